"""The final answer of a text: the first group of an expression's last match, found in time linear in the text.

Python's `re` backtracks, and the engine of `expressions` says only whether an expression is found, not where. So an expression that both
understand is run here as a list of threads that advance together, one character at a time (Thompson's simulation with captures). Threads
are in the order of preference, so a match is the one that `re.finditer` gives. A search has a budget of steps, which are counted and not
timed: its result is the same on every machine.

Source: Cox, "Regular Expression Matching: the Virtual Machine Approach" (2009), Pike's machine.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

MAX_PROGRAM = 4000
"""Instructions of an expression, in which repetitions are written out."""
MAX_SEARCH_STEPS = 4_000_000
"""Threads that a search may advance: seconds, and a thousand times what a text of a page needs."""

# Python's own parser, which has no public name: `sre_parse` warns.
_parser: Any = importlib.import_module("re._parser")
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}
_COMMA_IN_NUMBER = re.compile(r"(?<=[0-9]),(?=[0-9])")

# Start of the match, start and end of its first group.
_Captures = tuple[int, int, int]
_NOTHING = -1


class _CannotRun(Exception):
    pass


@dataclass
class _Instruction:
    """`op` is char, split, jump, save, at or match. A split prefers its first target."""

    op: str
    targets: tuple[int, ...] = ()
    test: Callable[[str], bool] | None = None
    what: str = ""
    known: dict[str, bool] = field(default_factory=dict)

    def fits(self, char: str) -> bool:
        """Whether a character can come here; each is looked at once."""
        answer = self.known.get(char)
        if answer is None:
            assert self.test is not None
            answer = self.known[char] = self.test(char)
        return answer


class _Compiler:
    """Makes instructions of a parsed expression."""

    def __init__(self) -> None:
        self.program: list[_Instruction] = []

    def add(self, instruction: _Instruction) -> int:
        """Append an instruction; returns its place."""
        if len(self.program) >= MAX_PROGRAM:
            raise _CannotRun(f"is too large: written out it takes more than {MAX_PROGRAM} instructions")
        self.program.append(instruction)
        return len(self.program) - 1

    def sequence(self, nodes: Any, flags: int) -> None:
        """Append what a list of parsed nodes means."""
        for op, value in nodes:
            self._node(str(op), value, flags)

    def _node(self, op: str, value: Any, flags: int) -> None:
        if op in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            self.add(_Instruction("char", test=_test(op, value, flags)))
        elif op == "BRANCH":
            self._branch(value[1], flags)
        elif op == "SUBPATTERN":
            group, more, fewer, nodes = value
            if group == 1:
                self.add(_Instruction("save", what="start"))
            self.sequence(nodes, (flags | more) & ~fewer)
            if group == 1:
                self.add(_Instruction("save", what="end"))
        elif op in ("MAX_REPEAT", "MIN_REPEAT"):
            self._repeat(*value, greedy=op == "MAX_REPEAT", flags=flags)
        elif op == "AT":
            name = str(value).removeprefix("AT_")
            if flags & re.MULTILINE and name in ("BEGINNING", "END"):
                name += "_LINE"
            self.add(_Instruction("at", what=name))
        else:
            raise _CannotRun(f"has a part that cannot be searched for ({op.lower()})")

    def _branch(self, choices: Any, flags: int) -> None:
        ends = []
        for nodes in choices[:-1]:
            split = self.add(_Instruction("split"))
            self.sequence(nodes, flags)
            ends.append(self.add(_Instruction("jump")))
            self.program[split].targets = (split + 1, len(self.program))
        self.sequence(choices[-1], flags)
        for end in ends:
            self.program[end].targets = (len(self.program),)

    def _repeat(self, least: int, most: Any, nodes: Any, *, greedy: bool, flags: int) -> None:
        def split_to(split: int, after: int) -> None:
            self.program[split].targets = (split + 1, after) if greedy else (after, split + 1)

        for _ in range(least):
            self.sequence(nodes, flags)
        if str(most) == "MAXREPEAT":
            split = self.add(_Instruction("split"))
            self.sequence(nodes, flags)
            self.add(_Instruction("jump", (split,)))
            split_to(split, len(self.program))
            return
        splits = []
        for _ in range(int(most) - least):
            splits.append(self.add(_Instruction("split")))
            self.sequence(nodes, flags)
        for split in splits:
            split_to(split, len(self.program))


def _test(op: str, value: Any, flags: int) -> Callable[[str], bool]:
    def one(kind: str, given: Any, char: str) -> bool:
        if kind == "LITERAL":
            return ord(char) == int(given)
        if kind == "RANGE":
            first, last = given
            return int(first) <= ord(char) <= int(last)
        name = str(given)
        if name in _CATEGORIES:
            return bool(_CATEGORIES[name](char))
        return not _CATEGORIES[name.replace("_NOT_", "_")](char)

    def plain(char: str) -> bool:
        if op == "ANY":
            return bool(flags & re.DOTALL) or char != "\n"
        if op == "IN":
            parts = [(str(kind), given) for kind, given in value]
            negated = parts[0][0] == "NEGATE"
            return negated != any(one(kind, given, char) for kind, given in parts[negated:])
        return (op == "LITERAL") == (ord(char) == int(value))

    if not flags & re.IGNORECASE or op == "ANY":
        return plain
    negated = op == "NOT_LITERAL" or (op == "IN" and str(value[0][0]) == "NEGATE")
    # What is left out is left out in either case.
    every = all if negated else any
    return lambda char: every(plain(form) for form in {char, char.lower(), char.upper()} if len(form) == 1)


@lru_cache(maxsize=64)
def _program(expression: str) -> tuple[_Instruction, ...]:
    try:
        parsed = _parser.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise _CannotRun(f"is not understood: {error}") from error
    if parsed.state.groups < 2:
        raise _CannotRun("has no group; put parentheses around the part that is the answer, as in: #### (-?[0-9.,]+)")
    compiler = _Compiler()
    compiler.sequence(parsed, parsed.state.flags)
    compiler.add(_Instruction("match"))
    return tuple(compiler.program)


def problem_with_extraction(expression: str) -> str:
    """Return why an expression cannot find answers, as the part of a message after its field; empty where it can."""
    try:
        _program(expression)
    except _CannotRun as error:
        return f"holds {expression!r}, which {error}"
    return ""


def final_answer(expression: str, text: str) -> str | None:
    """Return the first group of the last match in the text, without white space around it and without commas between digits.

    None where there is no match, its group is not part of it, or the search takes more than `MAX_SEARCH_STEPS`.
    """
    program, position, steps, found = _program(expression), 0, 0, None
    while position <= len(text):
        match, used = _search(program, text, position, MAX_SEARCH_STEPS - steps)
        steps += used
        if match is None:
            if steps >= MAX_SEARCH_STEPS:
                return None
            break
        (start, *found), end = match
        # As finditer: after an empty match, one character further on.
        position = end + (end == start)
    if found is None or _NOTHING in found:
        return None
    return _COMMA_IN_NUMBER.sub("", text[found[0] : found[1]].strip())


def _search(
    program: tuple[_Instruction, ...], text: str, begin: int, budget: int
) -> tuple[tuple[_Captures, int] | None, int]:
    """The first match from `begin` on, with its end; and the steps that this took."""
    best: tuple[_Captures, int] | None = None
    threads: list[tuple[int, _Captures]] = []
    steps = 0
    for position in range(begin, len(text) + 1):
        if best is None:
            reached = {place for place, _ in threads}
            _follow(program, threads, reached, 0, (position, _NOTHING, _NOTHING), text, position)
        if not threads and best is not None:
            break
        after: list[tuple[int, _Captures]] = []
        seen: set[int] = set()
        for place, captures in threads:
            steps += 1
            instruction = program[place]
            if instruction.op == "match":
                # Threads after this one are less preferred.
                best = captures, position
                break
            if position < len(text) and instruction.fits(text[position]):
                _follow(program, after, seen, place + 1, captures, text, position + 1)
        # Places that only lead on are work too.
        steps += len(seen)
        threads = after
        if steps >= budget:
            return None, budget
    return best, steps


def _follow(
    program: tuple[_Instruction, ...],
    threads: list[tuple[int, _Captures]],
    seen: set[int],
    first: int,
    captures: _Captures,
    text: str,
    position: int,
) -> None:
    """Add the threads that a place leads to without a character, the most preferred first; each place once."""
    waiting = [(first, captures)]
    while waiting:
        place, captures = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        instruction = program[place]
        if instruction.op in ("jump", "split"):
            waiting += [(target, captures) for target in reversed(instruction.targets)]
        elif instruction.op == "save":
            start, group_start, _ = captures
            is_start = instruction.what == "start"
            saved = (start, position, _NOTHING) if is_start else (start, group_start, position)
            waiting.append((place + 1, saved))
        elif instruction.op == "at":
            if _is_at(instruction.what, text, position):
                waiting.append((place + 1, captures))
        else:
            threads.append((place, captures))


def _is_at(what: str, text: str, position: int) -> bool:
    before, after = text[position - 1 : position] if position else "", text[position : position + 1]
    if what in ("BEGINNING", "BEGINNING_STRING"):
        return position == 0
    if what == "BEGINNING_LINE":
        return before in ("", "\n")
    # As the engine of `expressions` has it, only at the very end: Python's also stands before a last line break.
    if what in ("END", "END_STRING"):
        return not after
    if what == "END_LINE":
        return after in ("", "\n")
    is_word = _CATEGORIES["CATEGORY_WORD"]
    is_boundary = bool(before and is_word(before)) != bool(after and is_word(after))
    return is_boundary == (what == "BOUNDARY")
