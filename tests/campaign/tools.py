"""Counts the checkpoints of real tools that `nox -s tools` judged, from its reports: by format and by tool.

    nox -s tools && python tests/campaign/tools.py --record

A test that passed compared every number of the checkpoints it read with the tool's own decoder. Formats that no tool of
the run writes are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from bookkeeping import ROOT, Details, Figure, Part, Tallies, Tally

ENOUGH = 3  # checkpoints of a format


def read_report(report: Path, tally: Tally) -> Counter[str]:
    """The checkpoints of each format in one tool's report that were judged equal."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            tally.add(f"{report.stem}: {case.get('name')}")
        elif "skipped" not in kinds:
            formats = [str(each.get("value")) for each in case.iter("property") if each.get("name") == "format"]
            found.update(formats)
            tally.add(cases=len(formats))
    return found


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    tools = {tool: counts for shard in details for tool, counts in shard.get("tools", {}).items()}
    formats: Counter[str] = Counter()
    for counts in tools.values():
        formats.update(counts)
    each = ", ".join(f"{name} {count}" for name, count in sorted(formats.items()))
    few = [name for name, count in formats.items() if count < ENOUGH]
    reached = f"{sum(formats.values())} checkpoints of {len(tools)} tools equal, {tallies['R7'].failures} not: {each}"
    return {"R7": Figure(reached, tallies["R7"].cases, tallies["R7"].failures + len(few))}


def main() -> None:
    part = Part("tools", __doc__, figures, reports="build/tools")
    tally = Tally()
    reports = sorted((ROOT / part.arguments.reports).glob("*.xml"))
    tools = {report.stem: dict(read_report(report, tally)) for report in reports}
    part.finish({"R7": tally}, {"tools": tools})


if __name__ == "__main__":
    main()
