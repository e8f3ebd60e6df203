"""Style as a test: sizes, names, and calls that no part of the source may make."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.unit.source import Module, modules

FILE_LINES = 450
FUNCTION_LINES = 70
BANNED_WORDS = ("manager", "helper", "utils", "common")
BANNED_CALLS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "marshal.loads", "eval", "exec"}

every_module = pytest.mark.parametrize("module", modules().values(), ids=lambda module: module.name)


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _calls(module: Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


def _handlers(module: Module) -> Iterator[ast.ExceptHandler]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.ExceptHandler))


def _swallows(handler: ast.ExceptHandler) -> bool:
    """True for a handler of every exception that does nothing."""
    caught = handler.type
    broad = caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))
    return broad and all(isinstance(line, ast.Pass) for line in handler.body)


def test_the_source_is_found() -> None:
    assert len(modules()) > 40


@every_module
def test_a_file_and_its_functions_stay_small(module: Module) -> None:
    assert module.text.count("\n") < FILE_LINES
    sizes = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in _functions(module)}
    # A command's signature is its help text, so its annotated options do not count as code.
    allowed = 2 * FUNCTION_LINES if module.name == "swarm.cli" else FUNCTION_LINES
    assert {name: size for name, size in sizes.items() if size >= allowed} == {}


@every_module
def test_a_module_says_what_it_is(module: Module) -> None:
    assert ast.get_docstring(module.tree)


@every_module
def test_no_name_hides_what_it_does(module: Module) -> None:
    classes = [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    assert [n for n in (module.name, *classes) if any(word in n.lower() for word in BANNED_WORDS)] == []


@every_module
def test_no_handler_swallows_everything(module: Module) -> None:
    assert [h.lineno for h in _handlers(module) if h.type is None or _swallows(h)] == []


@every_module
def test_nothing_that_arrives_can_run_code(module: Module) -> None:
    assert [c.lineno for c in _calls(module) if ast.unparse(c.func) in BANNED_CALLS] == []
    assert module.uses("pickle", "marshal", "shelve", "dill", "cloudpickle") == []
    trusting = [
        call.lineno
        for call in _calls(module)
        for keyword in call.keywords
        if keyword.arg in ("trust_remote_code", "allow_pickle")
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    ]
    assert trusting == []


def test_the_checks_themselves_see_what_they_look_for() -> None:
    tree = ast.parse("try:\n    f()\nexcept Exception:\n    pass\n")
    (handler,) = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    assert _swallows(handler)
