"""The application: statuses, headers, documents, and how it starts and stops."""

import asyncio
import base64
import contextlib
import json
import re
import threading

import httpx
import numpy as np
import pytest

pytest.importorskip("starlette", reason='needs the server: pip install "regard[serve]"')

from playground.fakes import Reverser, said
from regard.playground import attend_api
from regard.playground.guard import HEADERS, THIS_MACHINE
from regard.playground.requests import Limits
from regard.playground.server import STATIC, Playground

PLANE = {"query": [[1, 2]], "key": [[0, 1], [2, 3]]}


@contextlib.asynccontextmanager
async def running(playground):
    """The application's life, and a client that talks to it without a network."""
    inbox, outbox = asyncio.Queue(), asyncio.Queue()
    app = playground.app()
    life = asyncio.create_task(app({"type": "lifespan"}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    await inbox.put({"type": "lifespan.shutdown"})
    assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
    await life


async def ready(client):
    while (await client.get("/healthz")).status_code != 200:
        await asyncio.sleep(0.005)


def asked(*requests, translator=None, **settings):
    """Sends requests (method, path, options) one after another; returns their answers."""

    async def run():
        async with running(Playground(translator or Reverser(), **settings)) as client:
            await ready(client)
            return [await client.request(m, path, **options) for m, path, options in requests]

    return asyncio.run(run())


def post(path, body):
    return ("POST", path, {"json": body})


def raw(content):
    headers = {"content-type": "application/json"}
    return ("POST", "/api/translate", {"content": content, "headers": headers})


def test_every_layer_and_head_is_returned():
    body = {"source": "a b c", "target": "x y"}
    (answer,) = asked(post("/api/layers", body))
    assert answer.status_code == 200
    maps = answer.json()["maps"]
    assert list(maps) == ["encoder", "decoder", "cross"]
    cross = maps["cross"]
    assert (cross["queries"], cross["keys"]) == (["x", "y"], ["a", "b", "c"])
    assert cross["shape"] == [2, 3, 2, 3]
    steps = np.frombuffer(base64.b64decode(cross["data"]), "<u2").reshape(cross["shape"])
    np.testing.assert_allclose(steps[0] / 65535, 1 / 3, atol=1e-4)
    np.testing.assert_array_equal(steps[1, 2], 65535 * np.eye(2, 3))


def test_a_translation_has_all_documented_fields():
    body = {"text": ["a b c", ""], "beam": 3, "n_best": 2}
    answer, more = asked(
        post("/api/translate", body),
        post("/api/translate", {**body, "text": "a b c", "weights": True, "next_words": 2}),
    )
    assert answer.status_code == more.status_code == 200
    first, second = answer.json()["translations"]
    expected = said("a b c", 1)
    assert first[1] == {
        "text": expected.text,
        "score": expected.score,
        "source_words": list(expected.source_words),
        "target_words": list(expected.target_words),
    }
    found = more.json()["translations"][0][1]
    assert found["next_words"][0] == [["b", 0.9], ["a", 0.01]]
    weights = np.frombuffer(base64.b64decode(found["weights"]["data"]), "<u2") / 65535
    weights = weights.reshape(found["weights"]["shape"])
    np.testing.assert_allclose(weights, expected.weights, atol=1e-5)
    assert len(first) == 2
    assert second[0]["target_words"] == []


def test_points_are_attended_to():
    (answer,) = asked(post("/api/attend", {**PLANE, "regime": "uniform"}))
    assert answer.json()["weights"] == [[0.5, 0.5]]
    assert answer.json()["output"] == [[1.0, 2.0]]


REFUSED = [
    (post("/api/translate", {"text": 1}), 422, "text must be"),
    (raw(b"{"), 422, "must be JSON"),
    (raw(b'{"text": "a", "\\ud800": 1}'), 422, "unknown fields"),
    (("POST", "/api/translate", {"content": b"{}"}), 415, "application/json"),
    (post("/api/translate", {"text": ["a " * 999] * 5}), 422, "at most 4096 tokens"),
    (post("/api/attend", {"query": []}), 422, "query must be"),
    (post("/api/layers", {"source": "a"}), 422, "source and target must be strings."),
    (post("/api/layers", {"source": "a", "target": "b " * 96}), 422, "95 tokens. Got 96"),
    (post("/api/layers", {"source": "a", "target": "b" * 2001}), 422, "2000 characters. Got 2001"),
    (raw(b"x" * 300_000), 413, "at most 262144 bytes"),
    (("GET", "/nowhere", {}), 404, "Not Found"),
    (("GET", "/static/../server.py", {}), 404, "Not Found"),
    (("GET", "/api/translate", {}), 405, "Method Not Allowed"),
    (("DELETE", "/", {}), 405, "Method Not Allowed"),
    (post("/api/translate", {"text": "BROKEN"}), 500, "its log has the reason"),
]


@pytest.mark.parametrize(("request_", "status", "message"), REFUSED)
def test_errors_are_json_with_their_status(request_, status, message, caplog):
    (answer,) = asked(request_)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert message in answer.json()["error"]
    assert ("failed" in caplog.text) == (status == 500)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("", 421),
    ],
)
def test_another_host_name_is_refused(name, status):
    request = ("POST", "/api/attend", {"json": PLANE, "headers": {"host": name}})
    (answer,) = asked(("GET", "/healthz", {}), request, hosts=THIS_MACHINE)[1:]
    assert answer.status_code == status
    assert status == 200 or "the name localhost" in answer.json()["error"]
    assert answer.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost"}, 200),
        ({"origin": "http://localhost", "sec-fetch-site": "same-origin"}, 200),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({"origin": "http://localhost:8001"}, 403),  # another port is another origin
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost.evil.example"}, 403),
        ({"origin": "http://evil.example/localhost"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),  # these three a page may send without asking first
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
        ({"content-type": ""}, 415),
    ],
)
@pytest.mark.parametrize("path", ["/api/attend", "/api/translate"])
def test_posts_from_another_origin_are_refused_before_any_work(path, headers, status):
    model = Reverser()
    body = json.dumps(PLANE if path == "/api/attend" else {"text": "a b"}).encode()
    headers = {"content-type": "application/json", **headers}
    (answer,) = asked(("POST", path, {"content": body, "headers": headers}), translator=model)
    assert answer.status_code == status
    assert status == 200 or model.calls == []
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_page_may_link_to_the_playground():
    (answer,) = asked(("GET", "/", {"headers": {"sec-fetch-site": "cross-site"}}))
    assert answer.status_code == 200


def test_work_for_a_client_that_leaves_is_dropped():
    """By ASGI's own messages: the body, then a disconnect while the model is busy."""
    door, model = threading.Event(), None
    model = Reverser(open_door=door)

    async def post(app, path, body, disconnect):
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        sent = []

        async def receive():
            if messages:
                return messages.pop(0)
            await disconnect.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "raw_path": path.encode()}
        await app(scope, receive, send)
        return sent[0]["status"]

    async def run():
        playground = Playground(model)
        async with running(playground) as client:
            await ready(client)
            app, left = playground.app(), asyncio.Event()
            first = asyncio.create_task(client.post("/api/translate", json={"text": "stays here"}))
            await asyncio.to_thread(model.started.wait, 5)
            gone = [
                asyncio.create_task(post(app, "/api/translate", {"text": f"a{i}"}, left))
                for i in range(50)
            ]
            while playground.batcher.sentences < 51:
                await asyncio.sleep(0.005)
            left.set()
            statuses = await asyncio.gather(*gone)
            waiting = playground.batcher.sentences
            door.set()
            return statuses, waiting, (await first).status_code

    statuses, waiting, first = asyncio.run(run())
    assert (set(statuses), waiting, first) == ({499}, 1, 200)
    assert [sentences for sentences, _, _ in model.calls] == [1]


def test_attend_has_a_deadline(monkeypatch):
    door = threading.Event()
    monkeypatch.setattr(attend_api, "answer", lambda request: door.wait(20))

    async def run():
        async with running(Playground(Reverser(), Limits(seconds=0.1))) as client:
            await ready(client)
            late = await client.post("/api/attend", json=PLANE)
            door.set()
            return late

    late = asyncio.run(run())
    assert (late.status_code, late.headers["retry-after"]) == (503, "5")
    assert "no answer within 0.1 seconds" in late.json()["error"]


def test_a_body_that_does_not_arrive_is_given_up():
    async def never():
        yield b'{"text": '
        await asyncio.sleep(5)
        yield b'"a"}'

    (answer,) = asked(raw(never()), limits=Limits(upload=0.1))
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")
    assert "within 0.1 seconds" in answer.json()["error"]


def test_a_body_without_a_length_is_measured():
    async def chunks():
        for _ in range(300):
            yield b"x" * 1024

    (answer,) = asked(raw(chunks()))
    assert answer.status_code == 413
    assert "at most" in answer.json()["error"]


def test_a_request_is_refused_where_the_queue_is_full_or_the_model_slow():
    door = threading.Event()
    model = Reverser(open_door=door)
    limits = Limits(queue=1, seconds=0.3)

    async def run():
        async with running(Playground(model, limits)) as client:
            await ready(client)
            slow = asyncio.create_task(client.post("/api/translate", json={"text": "a"}))
            await asyncio.to_thread(model.started.wait, 5)
            full = await client.post("/api/translate", json={"text": "b"})
            late = await slow
            door.set()
            return full, late

    full, late = asyncio.run(run())
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert "queue is full" in full.json()["error"]
    assert (late.status_code, late.headers["retry-after"]) == (503, "5")
    assert "within 0.3 seconds" in late.json()["error"]


def test_too_many_attends_are_refused():
    (answer,) = asked(post("/api/attend", PLANE), limits=Limits(attends=0))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_translations_are_refused_until_the_model_is_compiled():
    door = threading.Event()

    async def run():
        playground = Playground(Reverser(), warm=[lambda: door.wait(20)])
        async with running(playground) as client:
            answers = [await client.get("/healthz")]
            answers.append(await client.post("/api/translate", json={"text": "a"}))
            answers.append(await client.post("/api/attend", json=PLANE))
            door.set()
            await ready(client)
            answers.append(await client.post("/api/translate", json={"text": "a"}))
            return answers

    health, early, plane, late = asyncio.run(run())
    assert (health.status_code, health.json()) == (503, {"status": "starting", "compiling": True})
    assert early.status_code == 503
    assert "being compiled" in early.json()["error"]
    assert plane.status_code == late.status_code == 200


def test_the_server_works_after_a_failed_warming(caplog):
    def broken():
        raise RuntimeError("no memory")

    (answer,) = asked(post("/api/translate", {"text": "a b"}), warm=[broken])
    assert answer.status_code == 200
    assert "warming failed" in caplog.text


def test_optimized_programs_are_used_once_all_are_compiled():
    door, model = threading.Event(), Reverser()

    async def run():
        steps = [lambda: None, lambda: door.wait(20)]
        async with running(Playground(model, later=steps)) as client:
            await ready(client)
            assert (await client.get("/healthz")).json() == {"status": "ok", "compiling": True}
            await client.post("/api/translate", json={"text": "a b"})
            door.set()
            while (await client.get("/healthz")).json()["compiling"]:
                await asyncio.sleep(0.005)
            await client.post("/api/translate", json={"text": "a b"})

    asyncio.run(run())
    assert model.hurries == [None, False]


def test_optimized_programs_are_not_used_where_one_failed_to_compile(caplog):
    model = Reverser()

    def broken():
        raise RuntimeError("out of memory")

    async def run():
        async with running(Playground(model, later=[broken])) as client:
            while (await client.get("/healthz")).json()["compiling"]:
                await asyncio.sleep(0.005)
            await client.post("/api/translate", json={"text": "a b"})

    asyncio.run(run())
    assert model.hurries == [None]
    assert "warming failed" in caplog.text


def test_stopping_does_not_wait_for_all_warming_steps():
    ran = []
    door = threading.Event()

    def step():
        ran.append(1)
        door.wait(0.2)

    async def run():
        async with running(Playground(Reverser(), warm=[step] * 50)):
            await asyncio.sleep(0.05)

    asyncio.run(run())
    assert len(ran) < 5


def test_without_a_model_the_rest_works():
    async def run():
        async with running(Playground(None, missing="no model: train one.")) as client:
            await ready(client)
            texts = await client.post("/api/translate", json={"text": "a"})
            models = await client.get("/api/models")
            return texts, models, await client.post("/api/attend", json=PLANE)

    texts, models, plane = asyncio.run(run())
    assert (texts.status_code, texts.json()) == (503, {"error": "no model: train one."})
    assert models.json() == {"models": [], "status": "ok"}
    assert plane.status_code == 200


def test_shutting_down_answers_accepted_requests():
    door = threading.Event()
    model = Reverser(open_door=door)

    async def run():
        async with running(Playground(model)) as client:
            await ready(client)
            asked = [
                asyncio.create_task(client.post("/api/translate", json={"text": f"a b{i}"}))
                for i in range(5)
            ]
            await asyncio.to_thread(model.started.wait, 5)
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_later(0.1, door.set)
            # Leaving shuts down while all five wait.
        return await asyncio.gather(*asked)

    answers = asyncio.run(run())
    assert [one.json()["translations"][0][0]["text"] for one in answers] == [
        f"b{i} a" for i in range(5)
    ]


def test_security_headers_are_on_every_answer():
    gets = [("GET", path, {}) for path in [*STATIC, "/api/models", "/healthz", "/metrics"]]
    for answer in asked(*gets, ("GET", "/openapi.json", {}), *(one for one, _, _ in REFUSED)):
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, (str(answer.url), name)
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_the_page_has_no_inline_script_or_style_and_no_external_resource():
    answers = asked(*(("GET", path, {}) for path in STATIC))
    files = dict(zip(STATIC, answers, strict=True))
    assert all(answer.status_code == 200 for answer in answers)
    page = files["/"].text
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", page)
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page))
    assert named <= set(STATIC)
    for path, answer in files.items():
        text = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert answer.headers["content-type"].startswith(STATIC[path][1].split(";")[0])


def test_the_document_lists_every_route():
    (answer,) = asked(("GET", "/openapi.json", {}))
    described = answer.json()
    listed = {(path, name) for path, item in described["paths"].items() for name in item}
    routes = Playground(Reverser()).app().app.routes
    served = {
        (route.path, method.lower())
        for route in routes
        for method in route.methods - {"HEAD"}
        if route.path not in STATIC
    }
    assert listed == served
    translate = described["paths"]["/api/translate"]["post"]["responses"]
    assert set(translate) == {"200", "403", "408", "413", "415", "422", "429", "503"}


SAMPLE = re.compile(r'^([a-z_]+)(\{([a-z]+="[^"\n]*",?)+\})? (-?[0-9.e+-]+|\+Inf)$')


def test_the_metrics_can_be_read_and_count():
    requests = [post("/api/translate", {"text": ["a", "b"]})] * 3 + [("GET", "/x/y", {})] * 2
    *_, answer = asked(*requests, ("GET", "/x/z", {}), ("GET", "/metrics", {}))
    values, kinds = {}, {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("# HELP"):
            assert SAMPLE.match(line), line
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert values['regard_requests_total{path="/api/translate",status="200"}'] == 3
    assert values['regard_requests_total{path="other",status="404"}'] == 3
    assert values["regard_sentences_total"] == 6
    assert values["regard_waiting_sentences"] == 0
    assert values['regard_request_seconds_bucket{path="/api/translate",le="+Inf"}'] == 3
    assert kinds["regard_request_seconds"] == "histogram"
    assert not any("/x/" in name for name in values)


def test_large_counts_keep_every_digit():
    from regard.playground.guard import Metrics

    metrics = Metrics()
    metrics.batch(12_345_678, 1.0)
    assert "regard_sentences_total 12345678\n" in metrics.text()
