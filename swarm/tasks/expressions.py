"""A safe eval() for expressions that a model wrote: it evaluates arithmetic and refuses all other code.

It limits what the code may do, not how long it runs: an answer can make it recurse or compute for ever.
"""

from __future__ import annotations

import ast
import builtins
from typing import Any

CALLED = frozenset(
    {
        *("Integer", "Float", "Rational", "Symbol", "Add", "Mul", "Pow", "sqrt", "cbrt", "root", "exp", "log", "ln"),
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "acot", "asec", "acsc"),
        *("sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "Abs", "sign"),
    }
)
"""Functions that an answer may call, as sympy's parser writes them: numbers, symbols and elementary functions."""

EVALUATED = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
    *(ast.Call, ast.keyword),
)
"""Parts of an expression that only compute. Attribute access is excluded because it reaches the whole interpreter."""


def evaluate(source: Any, *spaces: Any) -> Any:
    """eval() of an expression that has only nodes in EVALUATED and calls only functions in CALLED; else ValueError."""
    if not isinstance(source, str):
        raise ValueError("only the text of an expression is evaluated")
    try:
        tree = ast.parse(source.strip(), mode="eval")
        nodes = list(ast.walk(tree))
        code = compile(tree, "<answer>", "eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is not an expression") from error
    for node in nodes:
        called = isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in CALLED)
        if called or not isinstance(node, EVALUATED):
            raise ValueError(f"an answer may hold only numbers and functions, no {type(node).__name__}")
    return builtins.eval(code, *(spaces or ({"__builtins__": {}},)))  # noqa: S307 - each part of it was checked
