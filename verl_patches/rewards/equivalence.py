"""Whether two answers are equal: rules around math-verify, and the helper process that applies them.

math-verify accepts answers that a reward must not; each rule here closes one such gap (versions: configs/
requirements-pypi.txt). It also bounds its work with SIGALRM, which needs the main thread and cannot stop one long C
call such as 10**10**10: this module is therefore run as a process (started by answer_checker.py) that the kernel ends
at a limit of CPU time.
"""

from __future__ import annotations

import functools
import json
import re
import resource
import signal
import sys

MAX_DEPTH = 12  # of brackets; ANTLR's time grows steeply with depth
MEMORY_BYTES = 1 << 30  # more than this on top of the imports is an attack, not an answer
_WALL_FACTOR = 30.0  # wall-clock limit over CPU limit, for a machine that is busy with other work

_COMMANDS = {"×": "times", "π": "pi", "∞": "infty", "∪": "cup", "≤": "le", "≥": "ge"}
_UNICODE = str.maketrans("−–÷", "--/") | {ord(sign): f"\\{command} " for sign, command in _COMMANDS.items()}
_WRAPPERS = re.compile(r"^(?:\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\])$")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\,|\\!|\{,\})(?=[0-9]{3}(?![0-9]))")
_MIXED = re.compile(r"([0-9]) ([0-9]+)/([0-9]+)")
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|~")
_PERCENT = re.compile(r"\s*\\?%$")
_TWO_NUMBERS = re.compile(r"[0-9] [0-9]")  # "4 5" would be read as 4 + 5
_UNSAFE = re.compile(r"\$|\\[(\[]|\\$|(?i:answer)")  # math-verify would search inside the answer for another answer
_EQUALS = re.compile(r"(?<![<>!:])=")
_NAME = re.compile(r"(?:[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?|\\[A-Za-z]+|\\text\{[^{}]*\})")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def tidy(answer: str) -> str:
    """Remove what carries no meaning: unicode signs, outer math delimiters, thousands marks, a final full stop."""
    answer = " ".join(answer.translate(_UNICODE).replace(r"\$", "").split())
    while match := _WRAPPERS.match(answer):
        inner = next(group for group in match.groups() if group is not None)
        if "$" in inner:
            break
        answer = inner.strip()
    answer = _SPACES.sub(" ", _THOUSANDS.sub("", answer)).strip()
    answer = _MIXED.sub(r"\1\\frac{\2}{\3}", answer)
    return answer[:-1].rstrip() if answer.endswith(".") else answer


def equivalent(gold: str, answer: str) -> bool:
    """Whether `answer` equals `gold`; both are LaTeX or plain text without a box around them.

    Values are compared by math-verify: 1/2, 0.5 and \\frac12 are one value, decimals agree to 6 places or to as many
    as the gold answer has. Stricter than math-verify in four things: every side of an equation must be right (5 is not
    given by 3=5), two numbers side by side are no answer, the answer is never searched for a part that fits, and a
    percent sign on one side only is overlooked for numbers above 1 but not for fractions of one (0.5% is not 0.5).
    """
    gold, answer = tidy(gold), tidy(answer)
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    if _UNSAFE.search(answer) or _TWO_NUMBERS.search(answer) or _depth(answer) > MAX_DEPTH:
        return False
    if _EQUALS.search(answer) and not _EQUALS.search(gold) and "," not in answer:
        first, *others = (side.strip() for side in _EQUALS.split(answer))
        sides = others if _NAME.fullmatch(first) else [first, *others]
        return all(side and _percent_aware(gold, side) for side in sides)
    return _percent_aware(gold, answer)


def _percent_aware(gold: str, answer: str) -> bool:
    bare_gold, bare_answer = _PERCENT.sub("", gold), _PERCENT.sub("", answer)
    gold_percent, answer_percent = bare_gold != gold, bare_answer != answer
    if gold_percent == answer_percent:
        return _same(bare_gold, bare_answer)
    if _NUMBER.fullmatch(bare_gold) and abs(float(bare_gold)) > 1 and _same(bare_gold, bare_answer):
        return True
    if gold_percent:
        return _same(rf"\frac{{{bare_gold}}}{{100}}", bare_answer)
    return _same(bare_gold, rf"\frac{{{bare_answer}}}{{100}}")


def _same(gold: str, answer: str) -> bool:
    from math_verify import verify

    decimals = len(gold.rpartition(".")[2]) if _NUMBER.fullmatch(gold) and "." in gold else 0
    parsed_gold, parsed = _parse(gold), _parse(answer)
    if not parsed_gold or not parsed:
        return False
    return bool(verify(list(parsed_gold), list(parsed), float_rounding=max(6, decimals), timeout_seconds=None))


@functools.lru_cache(maxsize=1024)  # a prompt's gold answer is parsed once per response
def _parse(answer: str) -> tuple:
    from math_verify import LatexExtractionConfig, parse

    config = (LatexExtractionConfig(boxed_match_priority=-1),)
    return tuple(parse(f"${answer}$", config, fallback_mode="no_fallback", parsing_timeout=None))


def _depth(answer: str) -> int:
    depth = deepest = 0
    for char in answer:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def _limit_cpu(cpu_s: float) -> None:
    """End this process by signal after so much CPU time (0: never). A default action also ends a long C call."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, cpu_s * _WALL_FACTOR)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})


def _reply(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _warm_up() -> None:
    pairs = ((r"\frac{1}{2}", "0.5"), ("[1,2)", "[1, 2)"), (r"\{1,2\}", r"\{2,1\}"), (r"2\sqrt{2}", r"\sqrt{8}"))
    for gold, answer in pairs:
        if not equivalent(gold, answer):
            raise RuntimeError(f"{gold} and {answer} differ: wrong versions, see configs/requirements-pypi.txt")


def serve() -> None:
    """Reply true or false to each line of stdin, a JSON list [gold, answer, cpu_s], until end of file.

    The first line on stdout is {"ready": true} or {"error": text}.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; its end closes our stdin
    _limit_cpu(60.0)
    try:
        _warm_up()
    except Exception as why:
        _reply({"error": f"{type(why).__name__}: {why}"})
        return
    with open("/proc/self/statm") as statm:
        now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    _limit_cpu(0.0)
    _reply({"ready": True})
    for line in sys.stdin:
        gold, answer, cpu_s = json.loads(line)
        _limit_cpu(cpu_s)
        try:
            verdict = equivalent(gold, answer)
        except Exception:  # MemoryError and RecursionError too: what cannot be compared is not equal
            verdict = False
        _limit_cpu(0.0)
        _reply(verdict)


if __name__ == "__main__":
    serve()
