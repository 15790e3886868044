"""What reads docstrings from source for the site completes those of operations, as the library does when it is run."""

from typing import Any

import griffe

from ejkernel.ops.operation import complete_docstring


class Operations(griffe.Extension):
    """Puts the call options into the docstrings of functions that are declared with `@document_options`."""

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Called for every function that is found."""
        declared = any(str(decorator.value) == "document_options" for decorator in func.decorators)
        if declared and func.docstring is not None:
            func.docstring.value = complete_docstring(func.docstring.value) or ""
