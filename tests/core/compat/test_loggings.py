"""Loggers that do nothing before their first message."""

import copy
import io
import logging
import os
import subprocess
import sys
import uuid

import pytest

from ejkernel import loggings
from ejkernel.loggings import ColorFormatter, ProgressLogger, get_logger


@pytest.fixture
def name(monkeypatch):
    """Of a logger that nobody has used."""
    monkeypatch.delenv("LOGGING_LEVEL_ED", raising=False)
    return f"test-{uuid.uuid4()}"


def test_nothing_happens_before_the_first_message(name, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own
    logger = get_logger(name)
    assert name not in logging.root.manager.loggerDict
    logger.info("hello %s", "there")
    assert len(logging.getLogger(name).handlers) == 1
    assert capsys.readouterr().err.endswith(f"INFO {name}: hello there\n")
    get_logger(name).info("again")
    assert len(logging.getLogger(name).handlers) == 1


@pytest.mark.parametrize(
    ("level", "variable", "want"),
    [
        (None, None, logging.INFO),
        (None, "debug", logging.DEBUG),
        ("error", "debug", logging.ERROR),
        (35, None, 35),
    ],
)
def test_the_level_is_read_with_the_first_message(name, monkeypatch, level, variable, want):
    logger = get_logger(name, level)
    if variable:
        monkeypatch.setenv("LOGGING_LEVEL_ED", variable)
    assert logger.level == want


def test_an_unknown_level_is_named(name, monkeypatch):
    with pytest.raises(ValueError, match=r"level: got 'loud', wants one of CRITICAL"):
        get_logger(name, "loud").info("hello")
    monkeypatch.setenv("LOGGING_LEVEL_ED", "quiet")
    with pytest.raises(ValueError, match=r"LOGGING_LEVEL_ED: got 'quiet'"):
        get_logger(name).info("hello")


@pytest.mark.parametrize(("level", "want"), [("debug", logging.WARNING), ("error", logging.ERROR)])
def test_other_processes_are_quieter(name, monkeypatch, level, want):
    monkeypatch.setattr(loggings._compat, "process_index", lambda: 1)
    assert get_logger(name, level).level == want


def test_a_program_that_set_up_logging_decides(name, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(stream)])
    get_logger(name).warning("hello")
    assert stream.getvalue() == "hello\n"
    assert logging.getLogger(name).handlers == []


def test_a_logger_can_be_copied(name):
    logger = copy.copy(get_logger(name, "error"))
    assert logger.level == logging.ERROR
    with pytest.raises(AttributeError, match="no attribute '_nothing'"):
        logger._nothing  # noqa: B018


def test_colours_are_those_of_the_level():
    record = logging.LogRecord("me", logging.WARNING, "", 0, "hello", None, None)
    assert ColorFormatter(color=False).format(record).endswith("WARNING me: hello")
    assert "\x1b[33mWARNING me:\x1b[0m hello" in ColorFormatter().format(record)


def test_progress_ends_with_a_message(name, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    progress = ProgressLogger(name)
    progress.update(1, 2, "half [of] it")
    progress.update_simple("the rest")
    progress.update(2, 2)
    progress.complete("made it")
    (shown,) = capsys.readouterr().err.splitlines()
    assert f"INFO {name}: made it (" in shown
    with pytest.raises(ValueError, match=r"current: got 3, wants a number of steps from 0 to total=2"):
        progress.update(3, 2)


def test_progress_is_drawn_on_a_terminal(name, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = ProgressLogger(name)
    progress.update(1, 2, "half [of] it")
    progress.complete()
    shown = capsys.readouterr().err
    assert "half [of] it" in shown
    assert "50%" in shown


def test_no_backend_is_started():
    script = """
import sys
from ejkernel.loggings import get_logger
logger = get_logger("quiet")
before = [name for name in ("rich", "ejkernel.modules.operations") if name in sys.modules]
logger.warning("hello")
from jax._src import distributed, xla_bridge
distributed.global_state.process_id = 3
print(before, get_logger("other").level, xla_bridge.backends_are_initialized())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[] 30 False\n"
    assert "WARNING quiet: hello" in done.stderr
