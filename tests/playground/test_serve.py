"""`regard serve`: its messages, refusals, time limits and shutdown."""

import contextlib
import json
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

from playground.fakes import Reverser, Said, served
from regard.cli.app import app
from regard.cli.commands import serve
from regard.playground.guard import THIS_MACHINE, timed_protocol
from regard.playground.requests import Limits
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


def test_a_port_that_is_taken_is_reported_before_anything_is_loaded(monkeypatch):
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


def test_uvicorn_answers_accepted_requests_before_it_ends():
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


def held(address, sent):
    """Opens a connection, sends these bytes, and returns the seconds until the server closes it,
    and what it answered."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        began = time.monotonic()
        for part in sent:
            connection.sendall(part)
            time.sleep(0.02)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                answer += data
        return time.monotonic() - began, answer


JSON = {"content-type": "application/json"}
HEAD = b"POST /api/translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        ([], b""),  # connected, and silent
        ([HEAD[:20]], b""),  # half a head
        ([HEAD, b"x: y\r\n", b"x: z\r\n"], b""),  # a head that never ends
        ([HEAD, b"content-length: 9\r\n\r\n", b'{"'], b"HTTP/1.1 408"),  # half a body
        ([b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n", HEAD[:9]], b"HTTP/1.1 200"),  # a second head
    ],
)
def test_a_connection_that_stalls_is_closed(sent, answered):
    limits = Limits(upload=0.5)
    app = Playground(Reverser(), limits).app()
    with served(app, http=timed_protocol(limits), timeout_keep_alive=30) as address:
        seconds, answer = held(address, sent)
    assert 0.3 < seconds < 5
    assert answer.startswith(answered)
    assert bool(answer) == bool(answered)


def test_two_hundred_idle_connections_do_not_block_others():
    limits = Limits(upload=0.5, connections=150)
    app = Playground(Reverser(), limits).app()
    with served(app, http=timed_protocol(limits)) as address, contextlib.ExitStack() as stack:
        host, port = address.removeprefix("http://").split(":")
        for number in range(200):
            idle = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            with contextlib.suppress(OSError):  # those past the limit are closed at once
                idle.sendall(HEAD[: number % len(HEAD)])
        time.sleep(1.5)
        answer = httpx.post(f"{address}/api/translate", json={"text": "a b"}, timeout=5)
    assert answer.status_code == 200


def test_a_client_that_does_not_read_is_cut_off():
    limits = Limits(seconds=0.5, upload=20, sentences=64)

    class Long(Reverser):
        def translate(self, texts, **settings):
            return [[Said("word " * 20_000, 0.0, (), (), None)] for text in texts]

    app = Playground(Long(), limits).app()
    with served(app, http=timed_protocol(limits)) as address:
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps({"text": ["a"] * 64}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            time.sleep(3)
            connection.settimeout(10)
            got = 0
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(1 << 20):
                    got += len(data)
    assert 0 < got < 6_000_000, "a part of 6.4 MB"


def test_work_for_a_client_that_hangs_up_is_dropped():
    door = threading.Event()
    model = Reverser(open_door=door)
    playground = Playground(model)
    limits = playground.limits
    with served(playground.app(), http=timed_protocol(limits)) as address:
        host, port = address.removeprefix("http://").split(":")
        for number in range(30):
            body = json.dumps({"text": f"a b{number}"}).encode()
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
                assert model.started.wait(10)
        dropped = 'regard_requests_total{path="/api/translate",status="499"} 30'
        for _ in range(1000):  # until the last one has been read and dropped
            counted = httpx.get(f"{address}/metrics").text
            if dropped in counted:
                break
            time.sleep(0.01)
        assert dropped in counted
        assert playground.batcher.sentences == 0
        door.set()
        answer = httpx.post(f"{address}/api/translate", json={"text": "a b"}, timeout=10)
        counted = httpx.get(f"{address}/metrics").text
    assert answer.status_code == 200
    assert sum(sentences for sentences, _, _ in model.calls) <= 2, "one was running already"
    assert "regard_abandoned_batches_total 1\n" in counted
    assert dropped in counted


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
        large = httpx.post(
            f"{address}api/translate", content=b"x" * 3_000_000, headers=JSON, timeout=20
        )
        assert large.status_code == 413
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert "stopped." in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_model_is_called_as_its_run(tmp_path):
    assert serve._name(tmp_path / "german") == "german"
    assert serve._name(tmp_path / "german" / "model") == "german"
