"""What reasoning-gym's scorers evaluate of a completion: expressions, and never code.

Some of them hand an answer to eval(), others to sympy's parse_expr, which does the same. Whoever samples would run
programs on the learner's machine. While a score is computed, both get an eval that looks at the expression first.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

EVALUATING = ("reasoning_gym.", "sympy.parsing.")  # Modules by the beginning of their names

CALLED = frozenset(
    {
        *("Integer", "Float", "Rational", "Symbol", "Add", "Mul", "Pow", "sqrt", "cbrt", "root", "exp", "log", "ln"),
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "acot", "asec", "acsc"),
        *("sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "Abs", "sign"),
    }
)
"""Functions that an answer may call: numbers, symbols and elementary functions, as sympy's parser writes them."""

EVALUATED = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
    *(ast.Call, ast.keyword),
)
"""Parts of an expression that do nothing but compute. An attribute would lead to everything there is."""


def evaluate(source: Any, *spaces: Any) -> Any:
    """eval() of an expression made of EVALUATED that calls nothing but CALLED. ValueError for any other."""
    if not isinstance(source, str):
        raise ValueError("only the text of an expression is evaluated")
    try:
        tree = ast.parse(source.strip(), mode="eval")
        nodes = list(ast.walk(tree))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is no expression") from error
    for node in nodes:
        called = isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in CALLED)
        if called or not isinstance(node, EVALUATED):
            raise ValueError(f"an answer may hold no {type(node).__name__} but of numbers and functions")
    code = compile(tree, "<answer>", "eval")
    return builtins.eval(code, *(spaces or ({"__builtins__": {}},)))  # noqa: S307 - each part of it was looked at


@contextmanager
def expressions_alone() -> Iterator[None]:
    """Meanwhile the modules in EVALUATING have `evaluate` for their eval."""
    # Before an answer has it loaded.
    import_module("sympy.parsing.sympy_parser")
    modules = [module for name, module in sys.modules.items() if name.startswith(EVALUATING)]
    for module in modules:
        vars(module)["eval"] = evaluate
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["eval"]
