"""Runs a bundle: draft, verify, accept, commit. Needs no torch.

from eagle_runtime import Session

with Session.open("bundle/") as session:
    for piece in session.stream(messages=[{"role": "user", "content": "Hello"}]):
        print(piece, end="", flush=True)
"""

from eagle_graphs import EagleError
from eagle_runtime.answer import Generation
from eagle_runtime.logprobs import TokenLogprobs
from eagle_runtime.processors import Processor
from eagle_runtime.sampling import Sampling
from eagle_runtime.session import Session, SessionBusyError
from eagle_runtime.stats import Stats

__all__ = [
    "EagleError",
    "Generation",
    "Processor",
    "Sampling",
    "Session",
    "SessionBusyError",
    "Stats",
    "TokenLogprobs",
]
