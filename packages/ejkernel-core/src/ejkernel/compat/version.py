"""The version that `ejkernel.__version__` reports."""

import os

from ejkernel._version import __version__

VERSION_VARIABLE = "EJKERNEL_UPSTREAM_VERSION"


def reported_version() -> str:
    """Returns the version of this library, or what the environment variable `EJKERNEL_UPSTREAM_VERSION` says.

    A library that was written for the earlier library of this name may compare `ejkernel.__version__` with the version
    that it was tested with, and refuse to be imported otherwise. Keys of configurations, the checks of plugins and the
    command line go by the version of this library.
    """
    return os.environ.get(VERSION_VARIABLE) or __version__
