"""Is the served checkpoint this canary? Four tokens spell the manifest's hash, whatever the MoE layers do.

Invariant: what a broken layer does to an answer is no reason to call it another checkpoint.
"""

import numpy as np

from truegate.canary.api import Api, Completion, Refusal, Server
from truegate.canary.manifest import FINGERPRINTS, Manifest
from truegate.canary.read import REL_TOLERANCE, read


def readable(manifest: Manifest, answer: Completion, index: int = 0) -> bool:
    """Whether the answer to fingerprint token `index` holds log-probabilities that can be read."""
    return bool(answer.tops) and read(manifest, index, answer.tops[0]).values is not None


def fingerprint_problem(manifest: Manifest, server: Server, api: Api) -> str | None:
    """Why the served checkpoint is not this canary; None when all of its fingerprint is right."""
    for index in range(FINGERPRINTS):
        try:
            answer = server.complete(api, [[manifest.token(index)]], 1)[0]
        except Refusal as refusal:
            return f"a fingerprint token was refused: {refusal}"
        if (problem := mismatch(manifest, api, index, answer)) is not None:
            return problem
        if api.top and not readable(manifest, answer, index):
            reading = read(manifest, index, answer.tops[0] if answer.tops else {})
            return (f"the server does not serve this canary, or its embedding, final norm or head is broken: "
                    f"fingerprint token {index} cannot be read ({reading.problem})")  # fmt: skip
    return None


def mismatch(manifest: Manifest, api: Api, index: int, answer: Completion) -> str | None:
    """Why this answer to fingerprint token `index` is another checkpoint's; None when it is right or unreadable."""
    if not api.top:
        right = bool(answer.tokens) and answer.tokens[0] == manifest.token(manifest.successor(index))
        return None if right else "the server does not serve this canary: a fingerprint token is answered otherwise"
    reading = read(manifest, index, answer.tops[0] if answer.tops else {})
    want = manifest.expected[index]
    if reading.values is None or reading.slack is None:
        return None
    if (np.abs(reading.values - want) <= REL_TOLERANCE * np.abs(want) + 2e-3 + reading.slack).all():
        return None
    return ("the server serves another checkpoint than this manifest describes: its fingerprint differs. "
            "Start it on this canary folder, or give the folder it was started on")  # fmt: skip
