"""Step 5, first half: the predicted speedup of every tree, from replay and the cost model."""

from collections.abc import Iterable, Sequence

from engine.replay import Replay
from engine.trace import Trace
from profiles import Acceptance, TreeConfig

from ..candidates import Candidate
from ..job import Job
from ..progress import Silent
from ..space import COARSE, near
from .model import CostModel, Prediction


class Predictor:
    """Predicts any draft's tree on recorded text.

    Args:
        job: Its drafts and their spaces.
        traces: Recorded text of the tune prompts.
        costs: The cost model.
    """

    def __init__(self, job: Job, traces: Sequence[Trace], costs: CostModel) -> None:
        self.costs = costs
        self.traces = traces
        self._job = job
        self._replays = {
            name: Replay(job.loaded.target, loaded.draft, traces, job.spaces[name].max_depth)
            for name, loaded in job.drafts.items()
        }

    def predict(self, draft: str, tree: TreeConfig) -> Prediction:
        """Return the predicted figures of one tree."""
        replayed = self._replays[draft].rounds(tree)
        return self.costs.predict(
            draft, tree, replayed, [len(trace.prompt) for trace in self.traces]
        )

    def candidate(self, draft: str, tree: TreeConfig) -> Candidate:
        """Return a tree with its prediction."""
        return Candidate(draft, tree, self.predict(draft, tree))

    def acceptance(self, drafts: Iterable[str]) -> list[Acceptance]:
        """Return, for drafts that were scored, how often children were right by depth and rank."""
        counts = {name: self._replays[name].acceptance() for name in drafts}
        return [
            Acceptance(draft=name, tried=tried, accepted=accepted)
            for name, (tried, accepted) in counts.items()
        ]

    def predict_all(self, progress: Silent) -> list[Candidate]:
        """Return the trees worth a look with their predictions.

        Of every draft those of a few widths and top-ks, then those near the best of them, then,
        at the best of all, those of the draft's variants.
        """
        job, candidates = self._job, []
        with progress.step("Replaying trees", len(job.drafts)) as tick:
            for base in (name for name in job.drafts if name not in job.variant_of):
                known = self._candidates(base, COARSE)
                known += self._candidates(base, near(*_best_pair(known)))
                for variant, of in job.variant_of.items():
                    if of == base:
                        candidates += self._candidates(variant, [_best_pair(known)])
                        tick()
                candidates += known
                tick()
        return candidates

    def _candidates(self, draft: str, pairs: Sequence[tuple[int, int]]) -> list[Candidate]:
        return [self.candidate(draft, tree) for tree in self._job.spaces[draft].enumerate(pairs)]


def _best_pair(candidates: Sequence[Candidate]) -> tuple[int, int]:
    """Return width and top-k of the best predicted tree."""
    tree = max(candidates, key=lambda c: c.prediction.decode_speedup).tree
    return tree.width, tree.top_k
