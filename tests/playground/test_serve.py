"""`regard serve`: what it says, what it refuses, and how it ends."""

import signal
import socket
import subprocess
import sys
import threading
import time
import types

import httpx
import pytest
from typer.testing import CliRunner

pytest.importorskip("uvicorn", reason='needs the server: pip install "regard[serve]"')

from playground.fakes import Reverser, served
from regard.cli.app import app
from regard.cli.commands import serve
from regard.playground.headers import THIS_MACHINE
from regard.playground.server import Playground
from regard.seq2seq.train import runtime_options


@pytest.fixture(scope="module", autouse=True)
def a_cache_of_its_own(tmp_path_factory):
    """The server keeps what it compiles: here not in the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def ran(monkeypatch):
    """Runs the command up to the moment where it would serve; returns what it would serve."""
    seen = []

    def run(playground, listening, announce):
        announce()
        seen.append((playground, listening.getsockname()))

    monkeypatch.setattr(serve, "_run", run)
    monkeypatch.setattr(
        runtime_options, "give_back_freed_memory", lambda: False
    )  # not of these tests

    def command(*arguments):
        result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
        return result, (seen or [None])[-1]

    return command


@pytest.fixture
def no_model(monkeypatch):
    """A translator that finds no model, and takes no time to be imported."""

    def load(folder):
        raise FileNotFoundError("a model is a folder, and it is not there.")

    module = types.SimpleNamespace(Translator=types.SimpleNamespace(load=load))
    monkeypatch.setitem(sys.modules, "regard.seq2seq.translator", module)


@pytest.mark.usefixtures("no_model")
def test_without_a_model_it_serves_the_rest_and_says_so(ran):
    result, (playground, (host, port)) = ran()
    assert result.exit_code == 0
    assert "no translator: a model is a folder, and it is not there." in result.stderr
    assert "Scores and Your own work" in result.stderr
    assert f"the playground: http://127.0.0.1:{port}/" in result.stderr
    assert (host, playground.translator) == ("127.0.0.1", None)
    for step in playground.warm:  # what compiles the page's first numbers must run
        step()
    assert "warning" not in result.stderr


@pytest.mark.usefixtures("no_model")
def test_a_model_that_is_named_must_be_there(ran, tmp_path):
    result, served_ = ran("--model", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "is not there" in result.stderr
    assert served_ is None


def test_another_address_is_warned_about(ran, monkeypatch):
    hosts = []
    monkeypatch.setattr(serve, "_playground", lambda _, names: hosts.append(names))
    monkeypatch.setattr(serve, "_bound", lambda host, port: socket.create_server(("127.0.0.1", 0)))
    result, _ = ran("--host", "0.0.0.0")
    assert "0.0.0.0 can be reached from other machines" in result.stderr
    assert "no authentication" in result.stderr
    result, _ = ran("--host", "localhost")
    assert "warning" not in result.stderr
    # Where others may come, they come by names that are not known here.
    assert hosts == [None, THIS_MACHINE]


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(serve, "_playground", lambda *_: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1, port {port}" in result.stderr
    assert "--port 0" in result.stderr


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_a_missing_extra_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 1
    assert package in result.stderr
    assert 'pip install "regard[serve]"' in result.stderr


def test_the_browser_is_opened_on_request(ran, monkeypatch):
    opened = []
    monkeypatch.setattr(serve, "_playground", lambda folder, hosts: None)
    monkeypatch.setattr(serve.webbrowser, "open", opened.append)
    ran()
    assert opened == []
    _, (_, (_, port)) = ran("--open")
    assert opened == [f"http://127.0.0.1:{port}/"]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8/"),
        ("0.0.0.0", "http://127.0.0.1:8/"),
        ("::1", "http://[::1]:8/"),
        ("::", "http://[::1]:8/"),
    ],
)
def test_addresses_can_be_clicked(host, address):
    assert serve._address(host, 8) == address


def test_uvicorn_answers_what_is_in_flight_before_it_ends():
    door, answers = threading.Event(), []
    model = Reverser(open_door=door)
    with served(Playground(model).app(), timeout_graceful_shutdown=10) as address:

        def ask(number):
            body = {"text": f"a b{number}"}
            answers.append(httpx.post(f"{address}/api/translate", json=body, timeout=20).json())

        asking = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in asking:
            thread.start()
        assert model.started.wait(10)
        time.sleep(0.2)  # the other four are in the queue
        threading.Timer(0.3, door.set).start()
        # Leaving tells uvicorn to end, while all five wait.
    for thread in asking:
        thread.join(10)
    texts = sorted(one["translations"][0][0]["text"] for one in answers)
    assert texts == [f"b{number} a" for number in range(5)]


def test_the_command_itself_serves_and_ends_by_ctrl_c():
    code = (
        "import sys; sys.modules['regard.seq2seq.translator'] = None\n"  # a light one, no model
        "from regard.cli import main; main()"
    )
    arguments = [sys.executable, "-c", code, "serve", "--port", "0"]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                break
        address = lines[-1].split()[2]
        while httpx.get(f"{address}healthz", timeout=20).json()["status"] != "ok":
            time.sleep(0.1)  # it compiles
        refused = httpx.post(f"{address}api/translate", json={"text": "a"}, timeout=20)
        assert refused.status_code == 503
        # More than the limit over a real connection: the answer arrives all the same.
        large = httpx.post(f"{address}api/translate", content=b"x" * 3_000_000, timeout=20)
        assert large.status_code == 413
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert "stopped." in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
