"""The two errors rowmax raises on purpose. Both say what arrived, what is required and how to mend it."""


class ProblemError(ValueError):
    """The call cannot mean anything: shapes, dtypes, devices or arguments contradict each other."""


class Unsupported(NotImplementedError):
    """The call is meaningful, but no candidate of the plan can run it. `refusals` maps candidate to reason."""

    def __init__(self, what: str, refusals: dict[str, str] | None = None):
        self.refusals = dict(refusals or {})
        lines = [what, *(f"  {name}: {reason}" for name, reason in self.refusals.items())]
        super().__init__("\n".join(lines))

    def __reduce__(self):
        return (type(self), (self.args[0].split("\n")[0], self.refusals))
