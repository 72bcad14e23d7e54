import sys
from types import SimpleNamespace

import pytest

from pserver.cli.main import main
from pserver.config import ServerSettings
from pserver.errors import ServerUnavailable


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line in this process; returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["pserver", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def served(monkeypatch):
    """The settings of the servers that were run; each answers at once at 127.0.0.1:43211 and is stopped."""
    settings = []

    def run_server(given, *, on_ready):
        settings.append(given)
        on_ready("127.0.0.1:43211")

    monkeypatch.setitem(sys.modules, "pserver.server.process", SimpleNamespace(run_server=run_server))
    return settings


def test_serve_prints_one_ready_line_of_a_coordinator(run, served):
    code, out, _ = run("serve", "--coordinator", "--min-servers", "2", "--port", "7077")
    assert code == 0
    assert out == "pserver ready name=s0 address=127.0.0.1:43211 coordinator=127.0.0.1:43211\n"
    assert served == [ServerSettings(name="s0", port=7077, min_servers=2)]


def test_serve_names_the_coordinator_that_it_joined(run, served):
    code, out, _ = run("serve", "--name", "s1", "--join", "10.0.0.1:7077", "--drain-s", "3", "--log-level", "warning")
    assert code == 0
    assert out == "pserver ready name=s1 address=127.0.0.1:43211 coordinator=10.0.0.1:7077\n"
    assert served == [ServerSettings(name="s1", join="10.0.0.1:7077", drain_s=3.0)]


def test_serve_may_be_told_to_share_no_memory(run, served):
    assert run("serve", "--coordinator", "--no-shared-memory")[0] == 0
    assert run("serve", "--coordinator")[0] == 0
    assert [each.shared_memory for each in served] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exactly one of --coordinator"),
        (("--coordinator", "--join", "127.0.0.1:1"), "but got both"),
        (("--join", "127.0.0.1:1", "--min-servers", "2"), "--min-servers"),
        (("--join", "nonsense"), "host:port"),
        (("--coordinator", "--port", "70000"), "port must be in"),
    ],
)
def test_serve_refuses_settings_that_make_no_sense(run, served, arguments, message):
    code, out, err = run("serve", *arguments)
    assert code == 1
    assert out == ""
    assert err.startswith("pserver: error: ")
    assert message in err
    assert served == []


def test_serve_shows_why_it_could_not_start(run, monkeypatch):
    def run_server(settings, *, on_ready):
        raise ServerUnavailable("port 7077 is taken")

    monkeypatch.setitem(sys.modules, "pserver.server.process", SimpleNamespace(run_server=run_server))
    assert run("serve", "--coordinator") == (1, "", "pserver: error: port 7077 is taken\n")


def test_status_shows_the_cluster(run, monkeypatch, make_status):
    asked = []

    def fetch_status(address):
        asked.append(address)
        return make_status()

    monkeypatch.setitem(sys.modules, "pserver.client.status", SimpleNamespace(fetch_status=fetch_status))
    code, out, err = run("status", "127.0.0.1:7077")
    assert (code, err) == (0, "")
    assert "mnist" in out
    assert asked == ["127.0.0.1:7077"]


def test_status_of_nobody_is_a_message_without_a_traceback(run, monkeypatch):
    def fetch_status(address):
        raise ServerUnavailable(f"{address} does not answer")

    monkeypatch.setitem(sys.modules, "pserver.client.status", SimpleNamespace(fetch_status=fetch_status))
    assert run("status", "127.0.0.1:1", "--json") == (1, "", "pserver: error: 127.0.0.1:1 does not answer\n")


@pytest.mark.parametrize("option", ["--servers", "--trainers"])
def test_launch_wants_at_least_one_of_each(run, tmp_path, option):
    script = tmp_path / "train.py"
    script.touch()
    code, _, err = run("launch", option, "0", str(script))
    assert code == 2
    assert option in err


def test_launch_passes_on_the_arguments_behind_the_dashes(run, monkeypatch, tmp_path):
    plans = []

    def launch(plan, *, live):
        plans.append((plan.servers, plan.trainers, plan.arguments, plan.imports, live))
        return 130

    monkeypatch.setattr("pserver.cli.launch.launch", launch)
    script = tmp_path / "train.py"
    script.touch()
    options = ("--servers", "2", "--trainers", "3", "--import", "mine", "--import", "yours")
    code, _, _ = run("launch", *options, str(script), "--", "--lr", "0.1", "--", "x")
    assert code == 130
    assert plans == [(2, 3, ("--lr", "0.1", "--", "x"), ("mine", "yours"), False)]


def test_serve_imports_modules_of_the_current_folder_first(run, served, monkeypatch, tmp_path):
    (tmp_path / "my_optimizers.py").write_text("print('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, _ = run("serve", "--coordinator", "--import", "my_optimizers")
    assert code == 0
    assert out.startswith("imported\n")
    assert len(served) == 1


def test_serve_says_which_module_it_cannot_import(run, served, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, _, err = run("serve", "--coordinator", "--import", "no_such_module_here")
    assert code == 1
    assert "--import no_such_module_here" in err
    assert served == []
