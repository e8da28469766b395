"""The allow-list: texts of topoproxy are kept, texts from outside are replaced."""

from __future__ import annotations

import ast
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.bundle.redaction import LOG_KEYS, RECORD_KEYS, ROOT, SECTIONS, Redactor, identifiers, vocabulary
from proxy.telemetry import exposition, metrics

KEPT = [
    "cannot query the daemon at /run/topoproxy/admin.sock: no process listens there",
    "2026-11-23T10:11:12.345+00:00 INFO    placed pod=shop/web-0 container=main cpus=0-3,8 mems=0",
    'I1123 10:11:12.345678   12345 reconciler.py:42] "placed" pod="shop/web-0" cpus="0-3"',
    "set containerRuntimeEndpoint: unix:///run/topoproxy/cri.sock there, and restart kubelet",
    "LS pod runs on the shared pool.",
    "cpu request about 500m from cpu_shares 512 of the CRI request",
    'topoproxy_creates_placed_total{pool="shared"} 17',
    "containerd v2.1.4 answers at /run/containerd/containerd.sock",
]
SECRETS = [
    "hunter2",
    "s3cr3t-Passw0rd",
    "AKIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiJ9.e30.ZRrHA1JJJW8opsbCGfG_HACGpVUMN_a9IV7pAx_Zmeo",
    "Pa$$wort",
    "Geheimnis",
    "4111-1111-1111-1111",
    "5f4dcc3b5aa765d61d8327deb882cf99",
]
CARRIERS = [
    "{}",
    "cannot read annotation example.com/token: {} is no number",
    "DB_PASSWORD={}",
    'err="rpc error: env PASSWORD={} is refused"',
    "Authorization: Bearer {}",
    "https://user:{}@registry.example:443/path",
    "/home/{}/.config",
    "pod=shop/web-0 reason={}",
    'container="{}"',
    "'{}'",
    '"a text with {} in it"',
    "({}), [{}]; {{{}}}",
    "unix:///{}/x.sock",
]


def redactor() -> Redactor:
    made = Redactor(["/run/topoproxy/cri.sock"])
    made.add_names(["shop/web-0", "main"])
    return made


@pytest.mark.parametrize("text", KEPT)
def test_messages_of_topoproxy_are_kept(text: str) -> None:
    assert redactor().redact_text(text) == text


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_in_no_text(secret: str, carrier: str) -> None:
    assert secret not in redactor().redact_text(carrier.replace("{}", secret))


@pytest.mark.parametrize("key", ["annotations", "labels", "env", "envs", "settings", "no-such-key-xyz"])
@pytest.mark.parametrize("value", ["correct", "the pod is placed", ["the"], {"the": "pod"}, "12345"])
def test_values_of_users_are_replaced_even_if_their_words_are_known(key: str, value: object) -> None:
    redacted = str(redactor().redact_value({"hook": {key: value}}))
    assert redacted.count("redacted") >= 1
    for word in ("correct", "the", "pod", "placed", "12345"):
        assert word not in redacted.replace("redacted", "")


def test_values_that_come_from_users_are_replaced_in_a_json_record_as_in_a_text_record() -> None:
    fields = {"msg": "placed the pod", "pod": "shop/web-0", "field": "the pod", "value": "correct", "v": 0}
    assert redactor().redact_fields(fields) == {
        **fields,
        "field": "<redacted:1>",
        "value": "<redacted:2>",
    }
    problem = {"what": "placed the pod", "keys": {"pod": "shop/web-0", "trace": ["the pod"]}}
    redacted = {"problems": [{**problem, "keys": {"pod": "shop/web-0", "trace": "<redacted:1>"}}]}
    assert redactor().redact_value({"problems": [problem]}) == redacted
    assert redactor().redact_text("placed field=correct") == "placed field=<redacted:1>"


def test_the_keys_of_each_record_are_known() -> None:
    source = (ROOT / "logs.py").read_text()
    assert all(f'"{key}"' in source for key in RECORD_KEYS)


def test_a_phrase_in_quotes_and_a_variable_are_replaced() -> None:
    assert redactor().redact_text("it has 'the pod is placed' there") == "it has '<redacted:1>' there"
    assert redactor().redact_text("password=correct") == "password=<redacted:1>"
    assert redactor().redact_text("code '123456'") == "code '<redacted:1>'"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("cannot reach https://user:secret@registry/path", "cannot reach <redacted:1>"),
        ("Authorization: Bearer static-token is refused", "Authorization: Bearer <redacted:1> is refused"),
        ("authorization: basic  kubelet", "authorization: basic  <redacted:1>"),
    ],
)
def test_credentials_of_known_words_are_replaced(text: str, redacted: str) -> None:
    assert redactor().redact_text(text) == redacted


@pytest.mark.parametrize("chunk", ["a1b2c3d4", "12345678abc", "c4-e1-b2", "9f8e7d", "x%y%z", "%%%%%%%%"])
def test_short_words_beside_digits_or_symbols_prove_nothing(chunk: str) -> None:
    """All single letters are words of the source."""
    assert redactor().redact_text(f"token {chunk}") == "token <redacted:1>"


@pytest.mark.parametrize("dashes", ["-", "--", "-D"])
def test_the_value_of_an_option_is_replaced(dashes: str) -> None:
    assert "node" not in redactor().redact_text(f"started with {dashes}password=node")


@pytest.mark.parametrize("text", ["# HELP", "enforce *", "cpu0 of node-1", "v1alpha2", "512MiB in 2.5ms"])
def test_signs_versions_and_units_are_kept(text: str) -> None:
    assert redactor().redact_text(text) == text


def test_the_message_of_a_klog_record_is_no_quoted_text() -> None:
    head = "I1123 10:11:12.345678   12345 reconciler.py:42] "
    line = f'{head}"cannot write the cpuset" pod="shop/web-0" err="no space"'
    assert redactor().redact_record(line) == line
    line = f'{head}"cannot use \\"the pod\\" of C:\\\\hunter2"'
    assert redactor().redact_record(line) == f'{head}"cannot use \\"<redacted:1>\\" of <redacted:2>"'
    assert redactor().redact_record('placed "the pod"') == 'placed "<redacted:1>"'


FROM_USERS = {"field", "fields", "points", "trace", "value", "values"}
"""Keys of the log whose values come from hooks, servers of hooks and objects of the cluster."""
WRITES = {
    *("debug", "error", "event", "exception", "frequent", "info", "problem", "resolved", "warning"),
    *("_report_problem", "report", "report_problem", "say_once"),
}


def keys_of_log_calls() -> set[str]:
    found = set()
    for file in ROOT.rglob("*.py"):
        if file.relative_to(ROOT).parts[0] in ("api", "attach", "cli", "demo"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                found |= {item.arg for item in node.keywords if item.arg and called in WRITES}
    return found - {"applied"}  # of CreateCalls.report, which writes no record


def test_all_keys_of_the_log_and_labels_of_metrics_are_known_or_of_users() -> None:
    keys = keys_of_log_calls()
    assert keys >= FROM_USERS
    assert keys - LOG_KEYS == FROM_USERS
    assert {label for metric in metrics.DAEMON_METRICS for label in metric.labels} <= LOG_KEYS
    assert not LOG_KEYS & SECTIONS


def test_keys_of_the_schemas_and_names_of_metrics_are_kept_with_their_values() -> None:
    """Some have words of two letters, or words that only the schema has."""
    document = {"uptime_s": 3, "last_error_at": "2026-11-23T10:11:12Z", "also_used_by": ["shop/web-0"]}
    assert redactor().redact_value(document) == document
    names = {name for metric in metrics.DAEMON_METRICS for name, _ in exposition.names(metric)}
    assert [name for name in sorted(names) if redactor().redact_text(f"{name} 1") != f"{name} 1"] == []
    assert "topoproxy_create_decision_seconds_bucket" in identifiers()


def test_settings_of_the_daemon_are_kept_and_those_of_hooks_are_not() -> None:
    settings = {"cpuManagerPolicy": "static", "sharedFloor": 2}
    policy = {"nodePolicy": {"values": [{"value": "static"}]}}
    assert redactor().redact_value({"settings": settings, **policy}) == {"settings": settings, **policy}
    for document in (
        {"hooks": {"settings": settings}},
        {"hooks": [{"settings": settings}]},
        {"values": ["static"]},
    ):
        assert "static" not in str(redactor().redact_value(document))


@pytest.mark.parametrize(
    "version",
    [
        "0.1.0",
        "v1.36.2",
        "1.6.24~ds1-1+deb12u1",
        "6.1.0-18-cloud-amd64",
        "v1.36.0-rc.1",
        "v1.30.5+k3s1",
        "1.1.6",
    ],
)
def test_versions_are_kept(version: str) -> None:
    assert redactor().redact_text(f"runc {version} sends") == f"runc {version} sends"


@pytest.mark.parametrize("address", ["10.0.0.17", "192.168.1.20", "1.2.3-hunter", "1.2.3+deb1u2x9"])
def test_addresses_and_other_endings_are_not_versions(address: str) -> None:
    assert redactor().redact_text(f"peer {address}") == "peer <redacted:1>"


def test_the_same_text_has_the_same_number() -> None:
    made = redactor()
    assert made.redact_text("zyxwv abcxyz zyxwv") == "<redacted:1> <redacted:2> <redacted:1>"
    assert made.replaced == 3


def test_a_name_is_a_name_only_if_it_looks_like_one() -> None:
    made = Redactor()
    made.add_names(["shop/web-0", "Not A Name", "x" * 300, 5, None])
    assert made.redact_text("shop/web-0 web-0") == "shop/web-0 web-0"
    assert "Name" not in made.redact_text("NotXyzq Aq Nameq")


@given(
    st.text(alphabet=string.ascii_letters + string.digits + "_-+/=.", min_size=12, max_size=60), st.randoms()
)
def test_a_random_token_is_never_kept(token: str, rng: random.Random) -> None:
    token = f"Zq{rng.randrange(16**8):08x}Xy{token}"
    carrier = rng.choice(CARRIERS)
    assert token not in redactor().redact_text(carrier.replace("{}", token))


def test_the_vocabulary_has_words_of_topoproxy_and_none_of_generated_code() -> None:
    names = vocabulary()
    assert {"cpuset", "kubelet", "placed"} <= names
    assert "seccomp_profile" not in names
