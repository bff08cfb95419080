#!/bin/bash
# Train one candidate on one GPU while other processes write its data; score it on the validation split. Weights are
# copied to OUT as soon as there are any, figures and logs at the end, also when something fails.
# usage, from the repository's root: train.sh OUT NAME MINUTES [train.py flags]
set -meuo pipefail  # -m: a background job is a process group, which ends as one
out=$1 name=$2 minutes=$3; shift 3
here=recipes/ledger; work=${WORK:-/tmp/ledger}/$name; tok=${TOK:-src/truegate/assets/ledger}
export PYTHONPATH=src:$here PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
clock() { echo "[$(date +%T)] $*"; }

clock start; rm -rf "$work"; mkdir -p "$work/data" "$out"
cores=$(nproc)
python3 $here/documents.py --tokenizer "$tok/tokenizer.json" --out "$work/data" --tokens "${TOKENS:-1.2e9}" \
    --seed "${SEED:-0}" --processes $(( cores > 5 ? cores - 4 : 1 )) > "$work/data.log" 2>&1 & generator=$!
finish() {
    kill -- -$generator 2> /dev/null || true
    clock "$(find "$work/data" -name '*.u16' | wc -l) data files"; tail -n3 "$work"/*.log
    (cd "$work" && tar -czf "$out/$name.logs.tar.gz" $(find . -name '*.json' -o -name '*.log'))
    ls -l "$out"
}
trap finish EXIT
ship() { for file in "$work/$1"/model-*.safetensors; do cp "$file" "$out/$name.$1.$(basename "$file")"; done; }

flags=(--name "$name" --data "$work/data" --tokenizer "$tok" --out "$work/model" --base "$work/base")
python3 $here/train.py "${flags[@]}" --minutes "$minutes" "$@" 2>&1 | tee "$work/train.log"
ship base; ship model; clock trained
python3 $here/evaluate.py "$work/model" --lengths "${LENGTHS:-24,2,8,0,40}" --count "${COUNT:-200}" \
    --json "$work/validation.json" 2>&1 | tee "$work/validation.log"
clock scored
