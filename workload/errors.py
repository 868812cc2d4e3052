"""Errors that users can fix."""


class UserError(Exception):
    """Invalid input or set-up: one line with the cause, the place and the fix.

    Commands print it without a traceback and exit with code 2.
    """


class FieldError(UserError):
    """An invalid value of a field. Readers add the file and line."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type["FieldError"], tuple[str, str]]:
        return FieldError, (self.field, self.problem)


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type's name."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
