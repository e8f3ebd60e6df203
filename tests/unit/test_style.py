"""Style as a test: sizes, names, and calls that no part of the source may make."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.source import Module, modules

FILE_LINES = 700
FUNCTION_LINES = 70
BANNED_WORDS = ("manager", "helper", "utils", "common")
BANNED_CALLS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "marshal.loads", "eval", "exec"}
BANNED_MODULES = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")


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


def _trusting(module: Module) -> list[str]:
    """Calls that let a model's own code or a pickle run."""
    return [
        f"{module.path}:{call.lineno}"
        for call in _calls(module)
        for keyword in call.keywords
        if keyword.arg in ("trust_remote_code", "allow_pickle") and ast.unparse(keyword.value) != "False"
    ]


def test_the_source_is_found() -> None:
    assert len(modules()) > 40


def test_a_file_stays_small() -> None:
    lines = {name: module.text.count("\n") for name, module in modules().items()}
    assert {name: count for name, count in lines.items() if count >= FILE_LINES} == {}


def test_a_function_stays_small() -> None:
    lines = {
        f"{name}.{function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name, module in modules().items()
        for function in _functions(module)
    }
    assert {name: count for name, count in lines.items() if count >= FUNCTION_LINES} == {}


def test_a_module_says_what_it_is() -> None:
    assert [name for name, module in modules().items() if not ast.get_docstring(module.tree)] == []


def test_no_name_hides_what_it_does() -> None:
    names = [*modules(), *(c.name for m in modules().values() for c in ast.walk(m.tree) if isinstance(c, ast.ClassDef))]
    assert [name for name in names if any(word in name.lower() for word in BANNED_WORDS)] == []


def test_no_handler_swallows_everything() -> None:
    found = [f"{m.path}:{h.lineno}" for m in modules().values() for h in _handlers(m) if h.type is None or _swallows(h)]
    assert found == []


def test_nothing_that_arrives_can_run_code() -> None:
    for module in modules().values():
        calls = [f"{module.path}:{c.lineno}" for c in _calls(module) if ast.unparse(c.func) in BANNED_CALLS]
        assert calls + _trusting(module) + module.uses(*BANNED_MODULES) == []


def test_the_checks_themselves_see_what_they_look_for() -> None:
    tree = ast.parse("try:\n    f()\nexcept Exception:\n    pass\n")
    (handler,) = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    assert _swallows(handler)
