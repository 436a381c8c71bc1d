"""`flexsp dump FOLDER`: who was where, from the files that ranks wrote after a fault (FLEXSP_DUMP) or by `sp.dump`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["described", "run"]

Group = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Prints what the files of a folder say together; 1 where there are none."""
    files = sorted(Path(args.folder).glob("rank_*.json"))
    if not files:
        raise ValueError(f"folder: expected files rank_N.json, got none in {args.folder}")
    rows = [json.loads(file.read_text()) for file in files]
    groups: dict[str, dict[int, Group]] = {}
    for row in rows:
        for group in row["groups"]:
            found = groups.setdefault(group["key"], {})
            found[group["rank"]] = group | {"host": row["host"], "written_ns": row["written_ns"]}
    for ranks in groups.values():
        print("\n".join(described(ranks)) + "\n")
    return 0


def described(ranks: Mapping[int, Group]) -> list[str]:
    """Lines about one group, from what its ranks wrote, by their rank in it."""
    first = next(iter(ranks.values()))
    members, missing = first["ranks"], [rank for rank in range(len(first["ranks"])) if rank not in ranks]
    lines = [f"{len(members)} ranks (of the world: {_listed(members)}), {first['transport']}, {first['schedule']}"]
    if missing:
        lines.append(f"no file of rank {_listed(missing)}: killed, or never told of a fault")
    for rank, group in sorted(ranks.items()):
        lines.append(f"  rank {rank} on {group['host']}: {_where(group)}")
        if group["failure"]:
            lines.append(f"      {group['failure'].splitlines()[0][:200]}")
    lines += _apart(ranks)
    faults = dict.fromkeys(group["first_fault"] for group in ranks.values() if group["first_fault"])
    return lines + [f"first fault: {fault}" for fault in faults]


def _where(group: Group) -> str:
    """What a rank did last."""
    if not group["exchanges"]:
        return "in no exchange yet"
    last = group["exchanges"][-1]
    since = (group["written_ns"] - (last["ended_ns"] or last["began_ns"])) / 1e9
    if not last["ended_ns"]:
        did = "in"
    else:
        did = "launched" if last["by"] == "kernel" else "done with"
    ends = [("from", last["source"]), ("to", last["target"])]
    between = " ".join(f"{word} rank {rank}" for word, rank in ends if rank is not None) or "all ranks"
    return f"{did} call {last['number']} {since:.1f} s before, {between}: {last['what']}"


def _apart(ranks: Mapping[int, Group]) -> list[str]:
    """The first call that ranks made differently, of those that several still have."""
    calls = {rank: {row["number"]: row["what"] for row in group["exchanges"]} for rank, group in ranks.items()}
    for number in sorted(set().union(*calls.values())):
        by_text: dict[str, list[int]] = {}
        for rank, made in sorted(calls.items()):
            if number in made:
                by_text.setdefault(made[number], []).append(rank)
        if len(by_text) > 1:
            said = [f"  rank {_listed(who)}: {text}" for text, who in by_text.items()]
            return [f"ranks differ first in call {number}:", *said]
    last: dict[int, list[int]] = {}
    for rank, made in sorted(calls.items()):
        last.setdefault(max(made, default=0), []).append(rank)
    ends = ", ".join(f"{number} of rank {_listed(who)}" for number, who in sorted(last.items()))
    return [f"last calls: {ends}"] if len(last) > 1 else []


def _listed(ranks: Sequence[int]) -> str:
    """0..3 or 0, 2."""
    ranks = list(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}..{ranks[-1]}"
    return ", ".join(map(str, ranks))
