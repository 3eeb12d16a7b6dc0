"""What is said of a CSV file that cannot be read as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedllm.data.arrow_files import read_csv


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "t.csv",
            "text;label\na, b;1\n",
            "its columns are separated by semicolons, expected commas; set data.delimiter, or save it with commas",
        ),
        (
            "t.csv",
            "text\tlabel\na\t1\n",
            "separated by tabs, expected commas; set data.delimiter, or save it with commas, or name it .tsv",
        ),
        (
            "t.tsv",
            "text,label\na,1\n",
            "separated by commas, expected tabs; set data.delimiter, or save it with tabs, or name it .csv",
        ),
        ("t.csv", "text,label\na,b\nc,d\ne,f,g\n", "row 3 has 3 columns, expected 2 as in the header"),
        ("t.csv", 'text,label\n"a\nb",b\ne\n', "row 2 has 1 columns, expected 2 as in the header"),
    ],
)
def test_errors_name_the_row_without_the_header_and_the_separator(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        read_csv(tmp_path / name, ["text"], "label")
