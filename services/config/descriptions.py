"""Descriptions of settings: the texts below their fields, as help and documentation show them."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from types import ModuleType

from pydantic import BaseModel


def description(name: str, model: type[BaseModel]) -> str:
    """Return the description of a setting in one line; services that have the same setting share a constant."""
    if shared := model.model_fields[name].description:
        return shared
    found = (texts_below_fields(sys.modules[kind.__module__]).get((kind.__name__, name)) for kind in model.__mro__)
    _, text = next(filter(None, found))
    return " ".join(text.split())


@cache
def texts_below_fields(module: ModuleType) -> dict[tuple[str, str], tuple[ast.expr, str]]:
    """Return the type of each field of a module's classes, and the text below it, by class and field."""
    found = dict[tuple[str, str], tuple[ast.expr, str]]()
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    for node in classes:
        for line, following in pairwise([*node.body, None]):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found[node.name, line.target.id] = line.annotation, text
                    case _:
                        found[node.name, line.target.id] = line.annotation, ""
    return found
