#!/bin/bash
# Train one or two candidates, each on its own GPU, while other processes write their data; score them on the validation
# split. Weights are copied to OUT as soon as a candidate is trained, figures and logs as they come.
# usage, from the repository's root: sweep.sh OUT MINUTES 'name gpu extra train.py flags' ...
set -u
out=$1 minutes=$2; shift 2
here=recipes/ledger; data=${DATA:-/tmp/ledger-data}; tok=${TOK:-src/truegate/assets/ledger}
export PYTHONPATH=src:$here PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
clock() { echo "[$(date +%T)] $*"; }

clock start; rm -rf "$data"; mkdir -p "$data"
ls -l "$tok/tokenizer.json" || exit 1
spare=$(( $(nproc) - 8 * $# )); df -h "$data" | tail -1
python3 $here/documents.py --tokenizer "$tok/tokenizer.json" --out "$data" --tokens 1.2e9 \
    --processes $(( spare > 1 ? spare : 1 )) > "$out/data.log" 2>&1 & generator=$!
stop() { pkill -P $generator; kill $generator 2> /dev/null; }
trap stop EXIT
for (( i = 0; ; i++ )); do
    [ "$(ls "$data" | grep -c u16)" -ge 8 ] && break
    if [ $i -gt 90 ] || ! kill -0 $generator 2> /dev/null; then
        clock "no data"; cat "$out/data.log"; ls -l "$data" | head; exit 1
    fi
    sleep 1
done
clock "first data"

jobs=()
for candidate in "$@"; do
    read -r name gpu flags <<< "$candidate"
    ( export CUDA_VISIBLE_DEVICES=$gpu
      python3 $here/train.py --name "$name" --data "$data" --tokenizer "$tok" --out "/tmp/$name" --minutes "$minutes" $flags \
          > "$out/$name.log" 2>&1 || { tail -25 "$out/$name.log"; exit 1; }
      for shard in /tmp/$name/model-*.safetensors; do cp "$shard" "$out/$name.$(basename "$shard")"; done
      clock "$name trained"; tail -1 "$out/$name.log"
      python3 $here/evaluate.py "/tmp/$name" --lengths "${LENGTHS:-2,24,8,0,40}" --count "${COUNT:-200}" \
          --json "/tmp/$name/validation.json" 2>&1 | tee -a "$out/$name.log"
      clock "$name scored" ) & jobs+=($!)
done
( sleep 75; clock "files: $(ls "$data" | grep -c u16)"; tail -qn2 "$out"/*.log ) & watch=$!
wait "${jobs[@]}"; kill $watch 2> /dev/null
clock "files: $(ls "$data" | grep -c u16)"; stop
small=(); for candidate in "$@"; do read -r name _ <<< "$candidate"; small+=($(cd /tmp; ls "$name"/*.json)); done
tar -czf "$out/logs.tar.gz" -C /tmp "${small[@]}" -C "$out" $(cd "$out"; ls *.log); rm -f "$out"/*.log; ls "$out"
