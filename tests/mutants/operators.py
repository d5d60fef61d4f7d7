"""Small faults from the syntax tree of a file: what a lapse would make of it."""
# ruff: noqa: N802 - methods are named by the kinds of nodes.

import ast
import itertools
import re
from typing import NamedTuple

_OLD = ["<", "<=", ">", ">=", "==", "!=", "in", "not in", "is", "is not", "and", "or"]
_NEW = ["<=", "<", ">=", ">", "!=", "==", "not in", "in", "is not", "is", "or", "and"]
_SWAPPED = dict(zip(_OLD, _NEW, strict=True))
_ENDS = {"[0]": "[-1]", "[-1]": "[0]", "[1:]": "[:-1]", "[:-1]": "[1:]"}
# Whose arguments are never of one type.
_UNLIKE = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast"}


class Edit(NamedTuple):
    """What an operator makes of a part of a file, in bytes, as `ast` counts columns."""

    operator: str
    begin: int
    end: int
    new: str

    def of(self, text):
        """Returns the file's text with the fault."""
        whole = text.encode()
        return (whole[: self.begin] + self.new.encode() + whole[self.end :]).decode()


class Finder:
    """Finds the places of all operators in the text of a file."""

    def __init__(self, text):
        self.text, self._bytes = text, text.encode()
        lengths = map(len, self._bytes.splitlines(keepends=True))
        self._starts = [0, *itertools.accumulate(lengths)]

    def edits(self):
        """Returns all faults after which the file can still be compiled."""
        return [
            edit
            for node in self._nodes(ast.parse(self.text))
            if (of_kind := getattr(self, f"_of_{type(node).__name__}", None))
            for edit in of_kind(node)
            if _compiles(edit.of(self.text))
        ]

    def _nodes(self, node):
        """Yields what runs: neither hints of types nor the texts of messages."""
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                    continue
                is_hint = name in ("annotation", "returns")
                if not is_hint or "Annotated[" in ast.unparse(child):
                    yield child
                    yield from self._nodes(child)

    def _span(self, node):
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _part(self, begin, end):
        return self._bytes[begin:end].decode()

    def _replaced(self, operator, node, new):
        return Edit(operator, *self._span(node), new)

    def _between(self, operator, nodes):
        for left, right in itertools.pairwise(nodes):
            begin, end = self._span(left)[1], self._span(right)[0]
            match = re.search(r"[^\s()].*[^\s()]|[<>]", self._part(begin, end))
            if match and (new := _SWAPPED.get(match[0])):
                yield Edit(operator, begin + match.start(), begin + match.end(), new)

    def _of_Compare(self, node):
        yield from self._between("comparison", [node.left, *node.comparators])

    def _of_BoolOp(self, node):
        yield from self._between("and, or", node.values)

    def _of_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            operand = self._part(*self._span(node.operand))
            yield self._replaced("not", node, f"({operand})")

    def _of_Constant(self, node):
        if type(node.value) is int:
            yield self._replaced("constant", node, str(node.value + 1))

    def _of_Subscript(self, node):
        begin, end = self._span(node.value)[1], self._span(node)[1]
        if new := _ENDS.get(self._part(begin, end)):
            yield Edit("first, last", begin, end, new)

    def _of_Call(self, node):
        for keyword in node.keywords:
            begin, end = self._span(keyword)
            if keyword.arg is not None:
                comma = re.match(rb"(\s*,\s*)?", self._bytes[end:]).end()
                yield Edit("keyword left out", begin, end + comma, "")
        if getattr(node.func, "attr", getattr(node.func, "id", "")) in _UNLIKE:
            return
        for pair in filter(_are_alike, itertools.pairwise(node.args)):
            (begin, middle), (after, end) = map(self._span, pair)
            spans = (after, end), (middle, after), (begin, middle)
            new = "".join(self._part(*span) for span in spans)
            yield Edit("arguments exchanged", begin, end, new)

    def _of_With(self, node):
        if all(item.optional_vars is None for item in node.items):
            end = self._span(node.items[-1].context_expr)[1]
            end += self._bytes[end:].index(b":")
            yield Edit("with left out", self._span(node)[0], end, "if True")

    def _of_ExceptHandler(self, node):
        body = self._span(node.body[0])[0], self._span(node.body[-1])[1]
        yield Edit("exception swallowed", *body, "pass")

    def _of_For(self, node):
        last = node.body[-1]
        while getattr(last, "body", None):
            last = (getattr(last, "orelse", None) or last.body)[-1]
        if not isinstance(last, ast.Raise | ast.Return | ast.Continue | ast.Break):
            end = self._span(node)[1]
            yield Edit("early return", end, end, "; break")

    def _of_arguments(self, node):
        for value in (*node.defaults, *node.kw_defaults):
            yield from self._of_default(value)

    def _of_AnnAssign(self, node):
        yield from self._of_default(node.value)

    def _of_default(self, value):
        if isinstance(getattr(value, "value", None), bool):
            yield self._replaced("default", value, str(not value.value))

    def _of_FunctionDef(self, node):
        within = [one for one in ast.walk(node) if hasattr(one, "lineno")][1:]
        # What is assigned was there before, so that no name is missing.
        known = {one.arg for one in within if isinstance(one, ast.arg)}
        for one in sorted(within, key=lambda one: one.lineno):
            if self._may_be_left_out(one, known):
                yield self._replaced("statement left out", one, "pass")
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                known.add(one.id)
        ends = (ast.Yield, ast.YieldFrom, ast.Return)
        if not any(isinstance(one, ends) and one.value for one in within):
            for statement in node.body[1:]:
                yield self._replaced("early return", statement, "return")

    def _may_be_left_out(self, node, known):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                return name in known
            case ast.If(orelse=[]):
                return self._part(*self._span(node)).startswith("if")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                return True
        return isinstance(node, ast.Expr | ast.AugAssign) and not (
            isinstance(getattr(node, "value", None), ast.Constant)
        )


def _are_alike(pair):
    if all(isinstance(one, ast.Constant) for one in pair):
        return len({type(one.value) for one in pair}) == 1
    return all(isinstance(one, ast.Name | ast.Attribute) for one in pair)


def _compiles(text):
    try:
        compile(text, "", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
