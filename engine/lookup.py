"""The lookup draft: n-grams that occurred before in the request's own text, short ones only."""

from .suffix import SuffixDraft


class LookupDraft(SuffixDraft):
    """The suffix draft without a memory of earlier answers.

    Args:
        min_match: Shortest n-gram, in tokens, whose followers are proposed.
        max_match: Longest n-gram looked up.
        min_probability: Nodes whose path is less likely are not proposed.
    """

    kind = "lookup"

    def __init__(
        self, min_match: int = 1, max_match: int = 5, min_probability: float = 0.0
    ) -> None:
        super().__init__(min_match, max_match, min_probability)
