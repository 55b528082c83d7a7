"""What a run's records must say: every draw ends once, every answer is whole, and its weights are those it was due.

`audit` reads `events.jsonl` and the recorded batches of a run that was not interrupted, and returns what is wrong.
`lost_seconds` tells what failures of servers cost.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dapo_megatron.rollout.journal import Journal
from dapo_megatron.rollout.records import digest, read_records

TAKEN = {"kept", "all_right", "all_wrong", "failed"}
Record = dict[str, Any]


def audit(folder: Path, staleness: int = 0) -> list[str]:
    """Sentences about what is wrong with the records in `folder`, a run's `rollouts/`; `staleness`: the bound."""
    records = list(read_records(folder))
    journal = Journal(folder)
    found = _draws(records)
    steps: dict[int, list[Record]] = defaultdict(list)
    step = 0
    for record in records:
        step = record["step"] if record["kind"] == "begin" else step
        steps[step].append(record)
    for number in sorted(steps.keys() - {0}):
        found += [f"step {number}: {text}" for text in _step(number, steps[number], journal, staleness)]
    return found + _servers(records)


def _draws(records: Iterable[Record]) -> list[str]:
    """Every draw is of one prompt and taken once; none is missing between those that are taken."""
    found, prompts, taken = list[str](), dict[int, int](), Counter[int]()
    for record in records:
        if record["kind"] == "draw" and prompts.setdefault(record["draw"], record["prompt"]) != record["prompt"]:
            found.append(f"draw {record['draw']} is of two prompts")
        if record["kind"] == "outcome" and record["outcome"] in TAKEN:
            taken[record["draw"]] += 1
    found += [f"draw {draw} is taken {times} times" for draw, times in taken.items() if times > 1]
    return found + [f"draw {draw} is lost" for draw in range(max(taken, default=-1) + 1) if not taken[draw]]


def _step(step: int, records: list[Record], journal: Journal, staleness: int) -> list[str]:
    """Draws of a step have an outcome, kept ones a whole group, and the batch is made of exactly these answers."""
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_kind[record["kind"]].append(record)
    drawn = Counter(record["draw"] for record in by_kind["draw"])
    ended = Counter(record["draw"] for record in by_kind["outcome"])
    found = [
        f"draw {draw} has {drawn[draw]} draws and {ended[draw]} outcomes"
        for draw in drawn | ended
        if (drawn[draw], ended[draw]) != (1, 1)
    ]
    kept = sorted(record["draw"] for record in by_kind["outcome"] if record["outcome"] == "kept")
    answers: dict[int, list[Record]] = defaultdict(list)
    for record in by_kind["answer"]:
        answers[record["draw"]].append(record)
    finished = {(r["draw"], r["index"]): r["tokens_after"] for r in by_kind["attempt"] if r["ended"] == "finished"}
    oldest = by_kind["begin"][0]["oldest"]
    for draw, group in answers.items():
        found += _group(draw, group, finished, oldest, oldest + staleness)
        if draw in kept and sorted(record["index"] for record in group) != list(range(len(group))):
            found.append(f"draw {draw}: an answer is missing")
    return found + _chains(by_kind["attempt"]) + _batch(step, kept, answers, by_kind["batch"], journal)


def _group(draw: int, group: list[Record], finished: dict[tuple[int, int], int], oldest: int, newest: int) -> list[str]:
    found = []
    if len({record["index"] for record in group}) != len(group):
        found.append(f"draw {draw}: an answer is there twice")
    for record in group:
        if sum(count for _, count in record["versions"]) != record["tokens"]:
            found.append(f"draw {draw}: weight versions do not cover an answer")
        if not all(oldest <= version <= newest for version, _ in record["versions"]):
            found.append(f"draw {draw}: an answer has weights {record['versions']}, due are {oldest} to {newest}")
    own = [record for record in group if not record["carried"]]
    if any(finished.get((draw, record["index"])) != record["tokens"] for record in own):
        found.append(f"draw {draw}: an answer was never finished by a server")
    return found


def _chains(attempts: Iterable[Record]) -> list[str]:
    """The attempts of an answer follow each other: each begins with the tokens that the one before left."""
    found, left = list[str](), dict[str, int]()
    for record in attempts:
        name = record["request"].rpartition("-")[0]
        if left.get(name, record["tokens_before"]) != record["tokens_before"]:
            found.append(f"answer {name} went on with {record['tokens_before']} tokens, it had {left[name]}")
        if record["tokens_after"] < record["tokens_before"]:
            found.append(f"answer {name} lost tokens")
        left[name] = record["tokens_after"]
    return found


def _batch(
    step: int, kept: list[int], answers: dict[int, list[Record]], batches: list[Record], journal: Journal
) -> list[str]:
    if len(batches) != 1:
        return [f"{len(batches)} batches"]
    header, tokens = journal.read(step)
    found = []
    if header.draws.tolist() != kept:
        found.append(f"the batch has the draws {header.draws.tolist()}, kept were {kept}")
    if batches[0]["digest"] != digest(tokens.response_tokens) or batches[0]["responses"] != header.num_responses:
        found.append("the batch is not the one that was recorded")
    parts = np.split(tokens.response_tokens, np.cumsum(header.response_lengths)[:-1])
    for place, draw in enumerate(header.draws.tolist()):
        trained = Counter(digest(parts[r]) for r in np.flatnonzero(header.groups == place))
        if trained != Counter(record["digest"] for record in answers[draw]):
            found.append(f"draw {draw}: the batch has other answers than were recorded")
    return found


def _servers(records: Iterable[Record]) -> list[str]:
    """Servers that finish answers have usable weights, whose versions never fall."""
    found, ready = [], dict[str, int]()
    for record in records:
        if record["kind"] == "server":
            if record["state"] == "ready":
                if record["version"] < ready.get(record["id"], 0):
                    found.append(f"server {record['id']} went back to version {record['version']}")
                ready[record["id"]] = record["version"]
            elif record["state"] == "joining":
                ready.pop(record["id"], None)
        elif record["kind"] == "attempt" and record["ended"] == "finished" and record["server"] not in ready:
            found.append(f"an answer of draw {record['draw']} was finished by {record['server']}, which is not ready")
    return found


def lost_seconds(folder: Path) -> dict[str, float]:
    """What failures cost, from the first time that a server has usable weights to the last record of one.

    Per server the seconds from being taken out to having usable weights again; as `all` those in which none had them.
    """
    lost: dict[str, float] = defaultdict(float, {"all": 0.0})
    ready: set[str] = set()
    out: set[str] = set()
    before = None
    for record in read_records(folder):
        if record["kind"] != "server" or "at" not in record:
            continue
        if before is not None:
            for id in [*out, *([] if ready else ["all"])]:
                lost[id] += record["at"] - before
        if record["state"] == "ready":
            ready.add(record["id"])
            out.discard(record["id"])
        elif record["state"] == "removed":
            ready.discard(record["id"])
            out.add(record["id"])
        before = record["at"] if ready or before is not None else None
    return dict(lost)
