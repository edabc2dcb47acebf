"""Test that the table of the catalogue in results.md is up to date."""

from tests.faults.table import PAGE, page_with_table


def test_the_table_of_the_catalogue_is_up_to_date():
    page = PAGE.read_text()
    assert page == page_with_table(page), "run: python -m tests.faults.table"
