"""One audit: find the API, check the fingerprint, ask, explain; the result is plain data.

Invariant: exit 0 only when every answer was read and right; a lost server is 3, a wrong checkpoint or refusals are 2.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from truegate import __version__
from truegate.canary.api import Api
from truegate.canary.ask import BETWEEN, Asker, Effort, Progress
from truegate.canary.cells import Cells, Measured, phases_in_order
from truegate.canary.client import Client, find_api
from truegate.canary.evidence import Evidence, Observation, QuestionAnswer
from truegate.canary.explain import Finding, Verdict, error_sizes, explain
from truegate.canary.fingerprint import fingerprint_problem, readable
from truegate.canary.manifest import Manifest
from truegate.canary.read import REL_TOLERANCE
from truegate.errors import EXIT_FAULT, EXIT_INVALID, EXIT_OK, EXIT_UNDECIDED, InvalidRun, UserError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to ask, and how."""

    url: str
    model: str | None = None
    timeout: float = 120.0
    headers: Mapping[str, str] | None = None


def audit(manifest: Manifest, target: Target, effort: Effort, progress: Progress) -> dict[str, Any]:
    """Ask a server and explain what it answered."""
    words = manifest.vocabulary.words(manifest.config["vocab_size"])
    client = Client(target.url, words, timeout=target.timeout, headers=target.headers or {})
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        progress("finding the API")
        api = find_api(client, [manifest.token(0)], lambda answer: readable(manifest, answer), model=target.model)
        if (stranger := fingerprint_problem(manifest, client, api)) is not None:
            evidence = Evidence(api=api, num_requests=client.num_requests)
            return result(manifest, evidence, Verdict(undecided=[stranger]), None, target, effort, started)
        evidence = Asker(manifest, client, api, effort, progress).run()
        verdict, seen = explain(manifest, evidence)
        return result(manifest, evidence, verdict, seen, target, effort, started)
    except InvalidRun as lost:
        api = Api(endpoint="completions", ids=True, top=0)
        evidence = Evidence(api=api, lost=str(lost), num_requests=client.num_requests)
        return result(manifest, evidence, Verdict(lost=str(lost)), None, target, effort, started)
    finally:
        client.close()


def exit_code(verdict: Verdict) -> int:
    if verdict.lost is not None:
        return EXIT_INVALID
    if verdict.findings:
        return EXIT_FAULT
    return EXIT_UNDECIDED if verdict.undecided else EXIT_OK


def result(
    manifest: Manifest, evidence: Evidence, verdict: Verdict, seen: Measured | None, target: Target, effort: Effort,
    started: str,
) -> dict[str, Any]:  # fmt: skip
    """Everything a report shows, and the evidence and manifest it can be explained from again."""
    return {
        "format": FORMAT, "truegate": __version__, "started": started, "url": target.url, "effort": effort.name,
        "family": manifest.data["family"], "digest": manifest.data["digest"], "api": asdict(evidence.api),
        "api_words": evidence.api.describe(), "exit": exit_code(verdict),
        "headline": headline(manifest, evidence, verdict),
        "covers": coverage(manifest, evidence), "findings": [_finding_json(f) for f in verdict.findings],
        "undecided": verdict.undecided, "notes": verdict.notes, "lost": verdict.lost,
        "right": verdict.num_right, "read": verdict.num_cells,
        "grid": {str(layer): phases for layer, phases in verdict.grid.items()},
        "sizes": {phase: {str(n): counts for n, counts in verdict.sizes[phase].items()}
                  for phase in evidence.phases if phase in verdict.sizes},
        "phases": evidence.phases, "seconds": evidence.seconds, "requests": evidence.num_requests,
        "errors": {} if seen is None or not evidence.api.top else error_sizes(seen),
        "matrices": {} if seen is None else {str(i): _matrix(cells) for i, cells in seen.layers.items()},
        "evidence": _evidence_json(evidence), "manifest": dict(manifest.data),
    }  # fmt: skip


def explain_again(data: Mapping[str, Any]) -> dict[str, Any]:
    """A saved result explained anew by this version."""
    if data.get("format") != FORMAT or "evidence" not in data:
        raise UserError("not a result of `truegate canary run --json`")
    manifest = Manifest(data["manifest"])
    evidence = _evidence(data)
    if not evidence.observations and not evidence.answers:
        return dict(data)
    verdict, seen = explain(manifest, evidence)
    effort = replace(Effort(), name=data["effort"])
    return result(manifest, evidence, verdict, seen, Target(url=data["url"]), effort, data["started"])


def headline(manifest: Manifest, evidence: Evidence, verdict: Verdict) -> str:
    """The first line of every report."""
    if verdict.lost is not None:
        return verdict.lost
    if verdict.findings:
        count = len(verdict.findings)
        return f"{count} fault{'s' * (count > 1)}: {'; '.join(f.title for f in verdict.findings[:3])}"
    if verdict.undecided:
        return "; ".join(verdict.undecided)
    layers = len(manifest.layers)
    what = f"{manifest.num_coefficients:,} coefficients" if evidence.api.top else f"{len(evidence.answers):,} answers"
    return f"all {what} of {layers} MoE layer{'s' * (layers > 1)} are right, in {_phase_words(evidence)}"


def _phase_words(evidence: Evidence) -> str:
    done = [p for p, what in evidence.phases.items() if not what.startswith("refused")]
    sizes = [int(p.removeprefix("batch ")) for p in done if p.startswith("batch ")]
    shown = [p for p in done if not p.startswith("batch ") and p not in ("again", BETWEEN)]
    words = [{"single": "prefill"}.get(p, p).replace("data-parallel rank", "requests for rank") for p in shown]
    if sizes:
        words.insert(min(3, len(words)), f"batches of {min(sizes)} to {max(sizes)}")
    return ", ".join(words)


def coverage(manifest: Manifest, evidence: Evidence) -> list[str]:
    """What a pass says, and what it does not."""
    if not evidence.observations and not evidence.answers:
        return []
    config = manifest.config
    layer = next(iter(manifest.layers.values()))
    shape = (
        f"hidden {config['hidden_size']}, {layer.spec.num_experts} experts of width {layer.spec.expert_intermediate}"
    )
    return [
        f"covered: {manifest.data['family']} routing ({layer.spec.kind}, top-{layer.spec.top_k}), {shape}, "
        f"{config['dtype']}, {len(manifest.layers)} MoE layers; the flags this server runs with; asked through "
        f"{evidence.api.describe()}",
        f"covered: which experts each probe reaches, their coefficients to {REL_TOLERANCE:.0%}, shared experts, the "
        "map from expert to weights, the sum over experts and ranks, in the phases listed",
        "not covered: other shapes, formats or flags; numerical accuracy of dense weights; attention; the tokenizer; "
        "sampling; the real model's checkpoint",
        *([] if evidence.api.top >= 20 or not evidence.api.top else
          [f"limited: the server gives {evidence.api.top} log-probabilities, so each answer shows "
           f"{evidence.api.top - 1} coefficients"]),
        *(["limited: requests named a data-parallel rank; no answer shows whether the server obeyed"]
          if any(p.startswith("data-parallel rank") for p in evidence.phases) else []),
    ]  # fmt: skip


def _finding_json(f: Finding) -> dict[str, Any]:
    return {"names": list(f.names), "title": f.title, "text": f.text, "layers": list(f.layers), "scope": f.scope,
            "phases": f.phases, "examples": list(f.examples),
            "alternatives": [list(a) for a in f.alternatives]}  # fmt: skip


def _matrix(cells: Cells) -> dict[str, Any]:
    """The first phase's readings, probe by probe: what the heat maps show."""
    first = [i for i, s in enumerate(cells.sights) if s.phase == phases_in_order(cells.sights)[0]]
    rows: dict[tuple[int, str], list[int]] = {}
    for i in first:
        rows.setdefault((cells.sights[i].row, cells.sights[i].kind.value), []).append(i)
    names, want, got = [], [], []
    for (row, kind), found in rows.items():
        values = cells.values[found]
        known = np.isfinite(values)
        merged = np.where(
            known.any(axis=0), np.where(known, values, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1), np.nan
        )
        names.append(f"{kind} {row}")
        want.append(np.round(cells.want[found].max(axis=0), 6).tolist())
        got.append([None if np.isnan(v) else round(float(v), 6) for v in merged])
    return {"phase": cells.sights[first[0]].phase if first else "", "probes": names, "expected": want, "measured": got}


def _evidence_json(e: Evidence) -> dict[str, Any]:
    return {
        "observations": [[o.phase, o.probe, {str(k): v for k, v in o.top.items()}, o.batch, o.row, o.position,
                          o.error, o.check] for o in e.observations],
        "answers": [[a.phase, a.question, a.token, a.position, a.batch] for a in e.answers], "wandered": e.wandered,
    }  # fmt: skip


def _evidence(data: Mapping[str, Any]) -> Evidence:
    raw = data["evidence"]
    out = Evidence(api=Api(**data["api"]), phases=dict(data["phases"]), seconds=dict(data["seconds"]),
                   lost=data["lost"], num_requests=data["requests"], wandered=dict(raw["wandered"]))  # fmt: skip
    out.observations = [
        Observation(p, q, {int(k): v for k, v in top.items()}, *rest) for p, q, top, *rest in raw["observations"]
    ]
    out.answers = [QuestionAnswer(*a) for a in raw["answers"]]
    return out
