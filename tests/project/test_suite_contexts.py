"""Tests of suite/contexts.py: programs of a process share contexts of MLIR."""

import threading

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax.interpreters.mlir import make_ir_context
from suite import contexts


def test_a_context_is_shared_by_some_programs():
    made = contexts.shared(object)
    found = [made() for _ in range(2 * contexts.PROGRAMS)]
    assert len({id(context) for context in found}) == 2
    assert found[0] is found[contexts.PROGRAMS - 1]


def test_another_thread_gets_contexts_of_its_own():
    made, found = contexts.shared(object), []
    own = made()
    thread = threading.Thread(target=lambda: found.extend([made(), made()]))
    thread.start()
    thread.join()
    assert len({id(own), *map(id, found)}) == 3


def test_a_machine_with_a_gpu_gets_contexts_of_its_own(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    made = contexts.shared(object)
    assert made() is not made()


def test_programs_that_share_a_context_are_those_of_contexts_of_their_own(monkeypatch):
    def texts():
        functions = (lambda x: jnp.sin(x) + 1, lambda x: x @ x)
        return [jax.jit(function).lower(jnp.ones((3, 3))).as_text() for function in functions]

    assert getattr(mlir, contexts.FUNCTION).__module__ == contexts.__name__
    together = texts()
    monkeypatch.setattr(mlir, contexts.FUNCTION, make_ir_context)
    assert make_ir_context.__module__ != contexts.__name__
    assert texts() == together
