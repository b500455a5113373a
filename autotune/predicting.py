"""Step 5, first half: the predicted speedup of every tree, from replay and the cost model."""

from collections.abc import Sequence

from engine.replay import Replay
from engine.trace import Trace
from profiles import Acceptance, TreeConfig

from .candidates import Candidate
from .cost_model import CostModel, Prediction
from .job import Job
from .progress import Silent


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
        self._spaces = job.spaces
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

    def acceptance(self) -> list[Acceptance]:
        """Return, for every draft, how often its children were right, by depth and rank."""
        return [
            Acceptance(draft=name, tried=tried, accepted=accepted)
            for name, (tried, accepted) in (
                (name, replay.acceptance()) for name, replay in self._replays.items()
            )
        ]

    def predict_all(self, progress: Silent) -> list[Candidate]:
        """Return every tree of every space with its prediction."""
        candidates = []
        trees = [
            (name, tree) for name, space in self._spaces.items() for tree in space.enumerate()
        ]
        with progress.step("Replaying trees", len(trees)) as tick:
            for draft, tree in trees:
                candidates.append(self.candidate(draft, tree))
                tick()
        return candidates
