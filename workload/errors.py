"""The one family of errors that a user can mend."""


class UserError(Exception):
    """Bad input or a broken set-up: one line that says what, where and how to mend it.

    Commands print it without a traceback and leave with exit code 2.
    """


class FieldError(UserError):
    """A value that a description does not admit; readers add the file and line it came from."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type["FieldError"], tuple[str, str]]:
        return FieldError, (self.field, self.problem)
