"""Turn local copies of LongBench, RULER and LongBench-v2 into rows for ``evaluate``.

    python examples/paper/benchmarks.py longbench --input data/*_e.jsonl \\
        --prompts config/dataset2prompt.json --out longbench-e.jsonl
    python examples/paper/benchmarks.py ruler --input 65536/data/*/validation.jsonl \\
        --out ruler.jsonl
    python examples/paper/benchmarks.py longbench-v2 --input data.json \\
        --prompts prompts/0shot.txt --out longbench-v2.jsonl

One row a sample, the first reference as its completion, made for ``--chat-template``. The prompts'
wording comes from the benchmarks' own files. ``python -m elastic_compile.evaluate`` scores the
reference token by token; the benchmarks' own scores need generated answers.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _reading import FormatError, records
from _sources import Fields, Skip
from convert import whole

from elastic_compile._files import read_json
from elastic_compile.training.data import Row, dump_rows

LONGBENCH = (
    'JSON lines of {"input", "context", "answers": [text, ...]} in files TASK.jsonl or '
    "TASK_e.jsonl, with a prompt for TASK in --prompts"
)
RULER = (
    'JSON lines of {"input", "outputs": [text, ...]} and perhaps "answer_prefix", in folders with '
    "the tasks' names"
)
LONGBENCH_V2 = (
    'a JSON array of {"question", "choice_A", "choice_B", "choice_C", "choice_D", "answer": '
    '"A" to "D", "context", "difficulty"} (data.json)'
)
CHOICES = ("A", "B", "C", "D")


def longbench(path: Path, prompts: Any) -> Iterator[Row | Skip]:
    """Rows of one task, labelled with its name."""
    task = path.name.removesuffix(".gz").rsplit(".", 1)[0].removesuffix("_e")
    template = prompts.get(task) if isinstance(prompts, dict) else None
    if not isinstance(template, str):
        raise FormatError(f"{path}: --prompts has no prompt for {task!r}. Expected: {LONGBENCH}")
    for where, record in records(path):
        fields = Fields(record, where, LONGBENCH)
        answers = fields.get(list, "answers")
        context, question = fields.text("context"), fields.text("input")
        if not answers or not isinstance(answers[0], str) or not answers[0].strip():
            yield Skip("no reference")
            continue
        try:
            prompt = template.format(context=context, input=question)
        except (KeyError, IndexError, ValueError) as error:
            raise FormatError(
                f"the prompt of {task!r} in --prompts: {error!r}; it may hold {{context}} and "
                "{input} only"
            ) from None
        yield Row(task, prompt=prompt, completion=answers[0].strip())


def ruler(path: Path, prompts: Any) -> Iterator[Row | Skip]:
    """Rows of one task, labelled with its folder's name."""
    for where, record in records(path):
        fields = Fields(record, where, RULER)
        outputs = fields.get(list, "outputs")
        prompt = fields.text("input") + (record.get("answer_prefix") or "")
        if not outputs or not all(isinstance(text, str) and text.strip() for text in outputs):
            yield Skip("no reference")
            continue
        yield Row(path.resolve().parent.name, prompt=prompt, completion=", ".join(outputs))


def longbench_v2(path: Path, prompts: Any) -> Iterator[Row | Skip]:
    """Rows labelled with how difficult they are."""
    for where, record in records(path):
        fields = Fields(record, where, LONGBENCH_V2)
        answer = fields.text("answer").strip()
        if answer not in CHOICES:
            raise fields.fail(f"the answer is {answer!r}, not A, B, C or D")
        parts = {f"$C_{letter}$": fields.text(f"choice_{letter}") for letter in CHOICES}
        # The document last: it may hold what looks like a mark.
        parts |= {"$Q$": fields.text("question"), "$DOC$": fields.text("context")}
        prompt = prompts
        for mark, text in parts.items():
            if mark not in prompts:
                raise FormatError(f"the prompt in --prompts has no {mark}")
            prompt = prompt.replace(mark, text.strip())
        yield Row(
            f"longbench_v2_{fields.text('difficulty')}",
            prompt=prompt,
            completion=f"The correct answer is ({answer})",
        )


BENCHMARKS: dict[str, tuple[Callable[[Path, Any], Iterator[Row | Skip]], str]] = {
    "longbench": (longbench, LONGBENCH),
    "ruler": (ruler, RULER),
    "longbench-v2": (longbench_v2, LONGBENCH_V2),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python examples/paper/benchmarks.py", description=(__doc__ or "").split("\n", 1)[0]
    )
    commands = result.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (_, looks) in BENCHMARKS.items():
        command = commands.add_parser(name, description=f"Reads {looks}.", help=looks)
        command.add_argument("--input", nargs="+", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True, help="JSONL file to write")
        if name != "ruler":
            command.add_argument(
                "--prompts", type=Path, required=True, help="the benchmark's own file of prompts"
            )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(arguments)
    make, looks = BENCHMARKS[args.benchmark]
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    try:
        prompts: Any = None
        if args.benchmark == "longbench":
            prompts = read_json(args.prompts)
        elif args.benchmark == "longbench-v2":
            prompts = args.prompts.read_text("utf-8")
        with whole(args.out) as file:
            for path in args.input:
                for row in make(path, prompts):
                    if isinstance(row, Skip):
                        skipped[row.reason] += 1
                    else:
                        file.write(dump_rows([row]).encode())
                        counts[row.task] += 1
            if not counts:
                raise FormatError(f"the input has no row. Expected: {looks}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: " + ", ".join(f"{count:,} {task}" for task, count in counts.items()))
    for reason, count in skipped.items():
        print(f"skipped: {count:,} {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
