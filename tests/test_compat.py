"""Which engines fit, and that a mismatch says what differs."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvnixl.compat import (
    ABSENT,
    CompatibilityCheck,
    Difference,
    compatibility_factors,
    compute_nixl_compatibility_hash,
    dump_factors,
    explain,
    hash_factors,
    load_factors,
)
from kvnixl.errors import CompatibilityError, ConfigError, WireError
from kvnixl.metadata import MAX_FACTORS_CHARS, KvNixlExtension

# Other processes may take the CPU for a while: how long a draw takes says nothing here.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def model_config(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "model": "org/model",
        "dtype": "torch.bfloat16",
        "revision": None,
        "code_revision": None,
        "kv_heads": 8,
        "head_size": 128,
        "layers": 32,
        "hf_config": SimpleNamespace(),
        **changes,
    }
    return SimpleNamespace(
        **values,
        get_total_num_kv_heads=lambda: values["kv_heads"],
        get_head_size=lambda: values["head_size"],
        get_total_num_hidden_layers=lambda: values["layers"],
    )


def speculative_config(method: str = "eagle3", **changes: Any) -> SimpleNamespace:
    draft = {
        "model": "org/draft",
        "hf_config": SimpleNamespace(eagle_aux_hidden_state_layer_ids=(1, 2)),
    }
    values: dict[str, Any] = {
        "method": method,
        "kv_cache_dtype": None,
        "parallel_drafting": False,
        "draft_model_config": model_config(**draft),
        **changes,
    }
    return SimpleNamespace(
        **values, use_eagle=lambda: method in ("eagle", "eagle3", "mtp", "dflash", "dspark")
    )


def config(
    *,
    model: SimpleNamespace | None = None,
    cache_dtype: str = "auto",
    hybrid: bool = True,
    speculative: SimpleNamespace | None = None,
) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=model or model_config(),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid),
        speculative_config=speculative,
    )


def factors(
    engine: SimpleNamespace | None = None,
    backend: str = "FLASH_ATTN",
    mode: str = "pull",
    version: str = "0.32.0",
) -> dict[str, Any]:
    return compatibility_factors(engine or config(), backend, mode, vllm_version=version)


# --- the factors and the hash -------------------------------------------------------------------


def test_the_hash_is_sha256_over_sorted_json_of_the_documented_factors() -> None:
    expected = {
        "vllm_version": "0.32.0",
        "nixl_connector_version": 14,
        "model": "org/model",
        "dtype": "torch.bfloat16",
        "num_kv_heads": 8,
        "head_size": 128,
        "num_hidden_layers": 32,
        "attn_backend_name": "FLASH_ATTN",
        "cache_dtype": "auto",
        "is_hma_enabled": True,
        "speculative_config": None,
        "transfer_mode": "pull",
    }
    text = json.dumps(expected, sort_keys=True)
    assert factors() == {**expected, "model_revision": None, "model_commit": None}
    assert (
        compute_nixl_compatibility_hash(config(), "FLASH_ATTN", vllm_version="0.32.0")
        == hash_factors(factors())
        == hashlib.sha256(text.encode()).hexdigest()
    )


EAGLE = config(speculative=speculative_config())
FLIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "vllm version": (factors(version="0.32.1"), "vllm_version"),
    "model": (factors(config(model=model_config(model="org/other"))), "model"),
    "dtype": (factors(config(model=model_config(dtype="torch.float16"))), "dtype"),
    "kv heads": (factors(config(model=model_config(kv_heads=4))), "num_kv_heads"),
    "head size": (factors(config(model=model_config(head_size=64))), "head_size"),
    "layers": (factors(config(model=model_config(layers=16))), "num_hidden_layers"),
    "backend": (factors(backend="FLASHINFER"), "attn_backend_name"),
    "cache dtype": (factors(config(cache_dtype="fp8")), "cache_dtype"),
    "hybrid allocator": (factors(config(hybrid=False)), "is_hma_enabled"),
    "transfer mode": (factors(mode="push"), "transfer_mode"),
    "a speculator": (factors(EAGLE), "speculative_config"),
}


@pytest.mark.parametrize("what", FLIPPED)
def test_each_factor_changes_the_hash_and_is_named_with_both_values(what: str) -> None:
    theirs, name = FLIPPED[what]
    ours = factors()
    assert hash_factors(theirs) != hash_factors(ours)
    assert explain(ours, theirs) == [Difference(name, ours[name], theirs[name])]
    with pytest.raises(CompatibilityError) as caught:
        _meet(ours, theirs)
    assert caught.value.differences == (Difference(name, ours[name], theirs[name]),)
    assert name in str(caught.value)
    if not isinstance(theirs[name], dict):
        assert repr(theirs[name]) in str(caught.value)


@pytest.mark.parametrize("what", ["tensor parallelism", "block size", "layout"])
def test_what_peers_compare_field_by_field_is_not_in_the_hash(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = set()
    for size, layout in ((16, "HND"), (32, "NHD")):
        engine = config()
        if what == "tensor parallelism":
            engine.parallel_config = SimpleNamespace(tensor_parallel_size=size)
        elif what == "block size":
            engine.cache_config.block_size = size
        else:
            engine.cache_config.kv_cache_layout = layout
            monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        hashes.add(hash_factors(factors(engine)))
    assert hashes == {hash_factors(factors())}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("method", speculative_config("eagle")),
        (
            "model",
            speculative_config(draft_model_config=model_config(model="org/other-draft")),
        ),
        ("parallel_drafting", speculative_config(parallel_drafting=True)),
        ("kv_cache_dtype", speculative_config(kv_cache_dtype="fp8")),
    ],
)
def test_each_factor_of_a_speculator_is_named(name: str, other: SimpleNamespace) -> None:
    found = explain(factors(EAGLE), factors(config(speculative=other)))
    assert f"speculative_config.{name}" in {difference.name for difference in found}


@pytest.mark.parametrize("name", ["revision", "code_revision"])
def test_the_revisions_of_a_draft_model_count(name: str) -> None:
    other = copy.deepcopy(EAGLE)
    setattr(other.speculative_config.draft_model_config, name, "abc")
    assert explain(factors(EAGLE), factors(other)) == [
        Difference(f"speculative_config.{name}", None, "abc")
    ]


def test_the_auxiliary_layers_of_a_draft_model_count() -> None:
    other = copy.deepcopy(EAGLE)
    other.speculative_config.draft_model_config.hf_config = SimpleNamespace()
    assert explain(factors(EAGLE), factors(other)) == [
        Difference("speculative_config.auxiliary_layer_ids", [1, 2], None)
    ]


def test_a_draft_that_inherits_the_cache_dtype_fits_one_that_names_it() -> None:
    inherits = config(cache_dtype="fp8", speculative=speculative_config())
    names = config(cache_dtype="fp8", speculative=speculative_config(kv_cache_dtype="fp8"))
    assert hash_factors(factors(inherits)) == hash_factors(factors(names))


def test_speculators_without_hidden_states_do_not_count() -> None:
    ngram = speculative_config("ngram", draft_model_config=None)
    assert factors(config(speculative=ngram)) == factors()


def test_unknown_versions_need_to_be_named() -> None:
    engine = config()
    assert factors(version="0.33.0")["nixl_connector_version"] == 15
    with pytest.raises(ConfigError, match=r"vLLM 0\.99\.1.*connector_version"):
        compatibility_factors(engine, "X", vllm_version="0.99.1")
    named = compatibility_factors(engine, "X", vllm_version="0.99.1", connector_version=31)
    assert named["nixl_connector_version"] == 31


def test_the_version_of_an_imported_vllm_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(ConfigError, match="vllm_version"):
        compatibility_factors(config(), "X")
    vllm = SimpleNamespace(__version__="0.32.5")
    monkeypatch.setitem(sys.modules, "vllm", vllm)  # type: ignore[arg-type]
    assert compatibility_factors(config(), "X")["vllm_version"] == "0.32.5"


def test_a_factor_without_json_form_is_named() -> None:
    with pytest.raises(ConfigError, match="'model'"):
        factors(config(model=model_config(model=Path("m"))))
    with pytest.raises(ConfigError, match="too long"):
        dump_factors({"model": "x" * MAX_FACTORS_CHARS})


# --- model revisions and paths ------------------------------------------------------------------


def _revised(revision: str | None, commit: str | None, model: str = "org/model") -> dict[str, Any]:
    hf_config = SimpleNamespace(_commit_hash=commit)
    return factors(config(model=model_config(model=model, revision=revision, hf_config=hf_config)))


@pytest.mark.parametrize(
    ("local", "remote", "name"),
    [
        ((None, None), ("v1", "aaa"), None),
        (("v1", None), (None, "aaa"), None),
        (("v1", None), ("v1", None), None),
        (("v1", None), ("v2", None), "model_revision"),
        (("main", "aaa"), ("v1", "aaa"), None),
        (("main", "aaa"), ("main", "bbb"), "model_commit"),
        (("v1", "aaa"), ("v2", None), "model_revision"),
    ],
)
def test_the_model_revision_is_compared_when_both_sides_know_it(
    local: tuple[str | None, str | None], remote: tuple[str | None, str | None], name: str | None
) -> None:
    ours, theirs = _revised(*local), _revised(*remote)
    assert hash_factors(ours) == hash_factors(theirs), "a stock peer must still fit"
    assert [difference.name for difference in explain(ours, theirs)] == ([name] if name else [])
    if name:
        with pytest.raises(CompatibilityError, match=name):
            _meet(ours, theirs)
    else:
        assert _meet(ours, theirs) == ()


def test_the_same_weights_under_another_path_can_be_allowed() -> None:
    ours, theirs = _revised("v1", "aaa", "/models/a"), _revised("v2", "bbb", "/mnt/a")
    with pytest.raises(CompatibilityError, match="/mnt/a"):
        _meet(ours, theirs)
    assert _meet(ours, theirs, allow_model_path=True) == (
        Difference("model", "/models/a", "/mnt/a"),
    )
    theirs["head_size"] = 64
    with pytest.raises(CompatibilityError) as caught:
        _meet(ours, theirs, allow_model_path=True)
    assert [difference.name for difference in caught.value.differences] == ["head_size"]


# --- meeting a peer -----------------------------------------------------------------------------


def _meet(ours: dict[str, Any], theirs: dict[str, Any], **policy: bool) -> tuple[Difference, ...]:
    extension = KvNixlExtension(incarnation=1, factors=dump_factors(theirs))
    return CompatibilityCheck(ours, **policy).check(hash_factors(theirs), extension, peer="P")


def test_a_stock_peer_is_accepted_by_hash_and_refused_with_both_hashes() -> None:
    mine = CompatibilityCheck(factors())
    assert mine.check(mine.hash) == ()
    assert mine.check(mine.hash, KvNixlExtension(incarnation=1)) == ()
    with pytest.raises(CompatibilityError, match="engine at 10") as caught:
        mine.check("f" * 64, peer="engine at 10.0.0.1:5600")
    assert mine.hash in str(caught.value)
    assert "f" * 64 in str(caught.value)
    assert "enforce_handshake_compat" in str(caught.value)
    assert (caught.value.local_hash, caught.value.remote_hash) == (mine.hash, "f" * 64)
    assert caught.value.differences == ()


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "7",
        "null",
        "[" * 40_000,
        "1" * 5000,
        '{"dtype": "another"}',
        '{"model": NaN}',
        "\ud800",
        "x" * (MAX_FACTORS_CHARS + 1),
    ],
)
def test_factors_that_do_not_give_the_claimed_hash_are_not_believed(text: str) -> None:
    mine = CompatibilityCheck(factors())
    extension = KvNixlExtension(incarnation=1, factors=text)
    assert mine.check(mine.hash, extension) == ()
    with pytest.raises(CompatibilityError) as caught:
        mine.check("f" * 64, extension)
    assert caught.value.differences == ()
    assert len(str(caught.value)) < 2000


def test_hostile_factors_do_not_flood_the_message() -> None:
    theirs = {**factors(), "dtype": "x" * 30_000, "model": "\x1b[2J\n", "\x1b[2J\n": 1}
    with pytest.raises(CompatibilityError) as caught:
        _meet(factors(), theirs)
    assert len(str(caught.value)) < 2000
    assert str(caught.value).isprintable()
    many = {**factors(), **{f"k{index}": "x" * 50 for index in range(500)}}
    with pytest.raises(CompatibilityError) as caught:
        _meet(factors(), many)
    assert len(caught.value.differences) == 500
    assert len(str(caught.value)) < 10_000


def test_when_not_enforced_a_mismatch_warns_once_per_peer_configuration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = CompatibilityCheck(factors(), enforce=False)
    theirs = factors(config(cache_dtype="fp8"))
    extension = KvNixlExtension(incarnation=1, factors=dump_factors(theirs))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = mine.check(hash_factors(theirs), extension, peer="P")
            assert [difference.name for difference in found] == ["cache_dtype"]
        assert len(caplog.records) == 1
        assert "cache_dtype: local 'auto', remote 'fp8'" in caplog.text
        assert mine.check("f" * 64, peer="stock") == ()
        assert mine.check("f" * 64, peer="stock") == ()
        assert len(caplog.records) == 2
        for index in range(5000):
            mine.check(f"{index:064x}")
    assert len(mine._warned) <= 1024


def test_factors_missing_on_one_side_are_named() -> None:
    ours, theirs = factors(), factors()
    del theirs["dtype"]
    theirs["new_factor"] = 1
    assert explain(ours, theirs) == [
        Difference("dtype", "torch.bfloat16", ABSENT),
        Difference("new_factor", ABSENT, 1),
    ]
    assert explain({}, {"spelled": ABSENT}) == [Difference("spelled", ABSENT, ABSENT)]


def test_values_are_compared_as_the_hash_sees_them() -> None:
    for ours, theirs in ((True, 1), (1, 1.0), ([1], [True]), ([{"a": 0}], [{"a": False}])):
        assert explain({"flag": ours}, {"flag": theirs}) == [Difference("flag", ours, theirs)]


def test_factors_nested_to_any_depth_are_believed_or_not_but_raise_nothing_else() -> None:
    mine = CompatibilityCheck(factors())
    for depth in range(50, 1500, 25):
        for text in (
            '{"a": ' * depth + "1" + "}" * depth,
            '{"a": ' + "[" * depth + "]" * depth + "}",
        ):
            with pytest.raises(CompatibilityError):
                mine.check(
                    hashlib.sha256(text.encode()).hexdigest(),
                    KvNixlExtension(incarnation=1, factors=text),
                )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
trees = st.dictionaries(st.text(max_size=5), json_values, max_size=5)


@given(trees, trees)
@PATIENT
def test_hashes_differ_exactly_if_a_difference_is_named(
    local: dict[str, Any], remote: dict[str, Any]
) -> None:
    assert load_factors(dump_factors(local)) == local
    assert explain(local, copy.deepcopy(local)) == []
    assert bool(explain(local, remote)) == (hash_factors(local) != hash_factors(remote))
    swapped = [Difference(name, theirs, ours) for name, ours, theirs in explain(local, remote)]
    assert explain(remote, local) == swapped


# --- the command --------------------------------------------------------------------------------


def _compare(tmp_path: Path, local: object, remote: object, *options: str) -> tuple[int, str]:
    files = []
    for name, content in (("a.json", local), ("b.json", remote)):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        files.append(str(tmp_path / name))
    done = subprocess.run(
        [sys.executable, "-m", "kvnixl.compat", *files, *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_compares_two_dumps(tmp_path: Path) -> None:
    code, output = _compare(tmp_path, factors(), factors())
    assert code == 0
    assert output.count(hash_factors(factors())) == 2
    assert "the engines fit" in output

    code, output = _compare(tmp_path, factors(), factors(EAGLE, backend="FLASHINFER"))
    assert code == 1
    assert "attn_backend_name: local 'FLASH_ATTN', remote 'FLASHINFER'" in output
    assert "speculative_config: local None" in output

    other = factors(config(model=model_config(model="/mnt/m")))
    assert _compare(tmp_path, factors(), other)[0] == 1
    assert _compare(tmp_path, factors(), other, "--allow-model-path")[0] == 0


def test_the_command_names_a_dump_that_cannot_be_read(tmp_path: Path) -> None:
    code, output = _compare(tmp_path, factors(), "not json")
    assert code == 2
    assert "b.json" in output
    assert "Traceback" not in output


def test_unreadable_text_is_a_wire_error() -> None:
    for text in ("{", "[1]", "x" * (MAX_FACTORS_CHARS + 1), "[" * 60_000):
        with pytest.raises(WireError, match="factors"):
            load_factors(text)
