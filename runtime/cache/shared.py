"""Pages that several sequences begin with."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, eq=False)
class SharedPages:
    """The first `num_tokens` of several sequences of a block, which one row computes into `pages`, and nobody writes to
    behind that. They are held until that row has left and all `num_users` have begun, who then hold them by themselves.
    `in_pass`: others may look at tokens of the pass that computes them, if their row or lane comes later in it.
    """

    num_tokens: int
    in_pass: bool
    num_users: int = 0  # that have not begun yet, and whoever keeps them for others to come
    num_computed: int = 0  # tokens that others may look at
    pages: list[int] = field(default_factory=list)
    is_left: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether others may go on from it in the pass that is being prepared."""
        return self.num_computed == self.num_tokens
