"""Tables of the command line, in a terminal of some width."""

from __future__ import annotations

import pytest

from horizon_client.cli import output

WHY = "quota: 1 of 1 running jobs of user ann (--max-resident-jobs); job gsm8k-long ends at about 14:05"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    monkeypatch.setattr(output, "terminal_width", lambda: request.param)
    return output.table(["JOB", "STATE", "WHY"], [["gsm8k-lora-r16", "QUEUED #2", WHY], ["b", "QUEUED #3", "-"]]).split(
        "\n"
    )


@pytest.mark.parametrize("shown", [80], indirect=True)
def test_a_reason_goes_on_in_further_lines_of_its_column(shown: list[str]) -> None:
    first, *more, last = shown[1:]
    assert first.split()[:3] == ["gsm8k-lora-r16", "QUEUED", "#2"] and last.split() == ["b", "QUEUED", "#3", "-"]
    column = first.index("quota")
    assert " ".join(line[column:].strip() for line in (first, *more)) == WHY
    assert all(line[:column].isspace() for line in more) and max(map(len, shown)) <= 80


@pytest.mark.parametrize("shown", [50], indirect=True)
def test_a_reason_is_shortened_where_its_column_would_be_a_ribbon(shown: list[str]) -> None:
    assert len(shown) == 3 and "\N{HORIZONTAL ELLIPSIS}" in shown[1] and max(map(len, shown)) <= 50


@pytest.mark.parametrize("shown", [None], indirect=True)
def test_a_file_gets_each_row_as_one_line(shown: list[str]) -> None:
    assert shown[1].endswith(WHY) and len(shown) == 3
