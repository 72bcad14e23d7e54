import io
import json

from rich.console import Console

from pserver.cli.status import bytes_text, show_status, staleness_text, status_tables


def test_tables_show_servers_models_shards_and_trainers(make_status):
    console = Console(file=io.StringIO(), width=160)
    for table in status_tables(make_status(reported=({"loss": 0.25}, {"loss": 0.5}))):
        console.print(table)
    text = console.file.getvalue()
    for expected in (
        "127.0.0.1:43211",
        "Bsp(backup_workers=1)",
        "480",
        "mean 1.0, max 2",
        "ranks 0, 1",
        "1.5 MB",
        "9.5 s",
        "loss 0.25",
        "71",
    ):
        assert expected in text


def test_staleness_is_summed_up():
    assert staleness_text({}) == "-"
    assert staleness_text({0: 3, 1: 1, 6: 1}) == "mean 1.4, max 6"


def test_names_that_look_like_markup_are_shown_as_they_are(make_status):
    console = Console(file=io.StringIO(), width=160)
    for table in status_tables(make_status(reported=({"[bold]loss": 1.0},))):
        console.print(table)
    assert "[bold]loss 1" in console.file.getvalue()


def test_json_is_all_that_is_printed_and_holds_every_field(make_status, capsys):
    show_status(make_status(), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["servers"] == [{"name": "s0", "address": "127.0.0.1:43211", "alive": True, "silent_s": 0.2}]
    assert printed["models"][0]["shards"][0]["num_bytes"] == 1_500_000
    assert printed["models"][0]["staleness"] == {"0": 240, "2": 240}
    assert printed["trainers"][0]["reported"] == {"loss": 0.25}


def test_json_has_null_for_a_loss_that_is_not_finite(make_status, capsys):
    show_status(make_status(reported=({"loss": float("nan")},)), as_json=True)
    assert json.loads(capsys.readouterr().out)["trainers"][0]["reported"] == {"loss": None}


def test_bytes_are_shown_in_the_unit_that_suits_them():
    assert [bytes_text(n) for n in (0, 999, 1500, 12_300_000, 5e9, 7e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "12.3 MB",
        "5.0 GB",
        "7.0 TB",
    ]
