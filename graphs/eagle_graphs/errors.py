"""The one error that is meant for the user."""


class EagleError(ValueError):
    """A fault that the user can mend: a bad option, file, bundle or checkpoint.

    Its message says what was found, what was expected and what to do. The commands print it on
    one line and exit with status 2; anything else that is raised is a fault of this project.
    """
