"""The catalog: stock tasks unchanged, deterministic prompts, context boundaries, clear errors.

``KVACC_TEST_DATA_DIR`` names a folder with real benchmark data to test on as well; without
it, the embedded items stand in for the benchmarks' files, which have the same fields.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvacc.errors import KvaccError
from kvacc.task_catalog import (
    BENCHMARKS,
    GROUPS,
    SMOKE_TESTS,
    TaskSource,
    canonical_options,
    chance_level,
    cluster_key,
    context_boundary,
    data_fingerprint,
    find_task,
    hub_reachable,
    load_tasks,
    loading,
    task_names,
    tasks_folder,
    write_task_yamls,
)

RETENTION = tuple(name for name, task in task_names().items() if task.kind == "retention")
REAL_DATA = os.environ.get("KVACC_TEST_DATA_DIR")


def copy_items(folder: Path) -> Path:
    """A data folder made of the embedded items."""
    for name in BENCHMARKS:
        (folder / name).mkdir(parents=True)
        source = tasks_folder() / "mini" / f"{name}.jsonl"
        shutil.copy(source, folder / name / f"{find_task(name).split}.jsonl")
    return folder


@pytest.fixture(scope="module")
def items_folder(tmp_path_factory):
    return copy_items(tmp_path_factory.mktemp("data"))


@pytest.fixture(params=["items", *(["real"] if REAL_DATA else [])])
def any_folder(request, items_folder):
    return items_folder if request.param == "items" else Path(REAL_DATA)


def prompts(task, seed: int = 1234, limit: int = 12, **options) -> list:
    """What lm-eval itself builds: instances with ``.doc`` and ``.args`` (prompt, continuation)."""
    task.set_fewshot_seed(seed)
    task.build_all_requests(limit=limit, **options)
    return task.instances


# ------------------------------------------------------------------ names


def test_catalog_names():
    assert BENCHMARKS == ("piqa", "hellaswag", "copa", "winogrande", "openbookqa", "boolq")
    assert SMOKE_TESTS == tuple(f"kvacc_mini_{name}" for name in BENCHMARKS)
    kinds = (
        "passkey", "needle", "multi_needle", "all_needles", "keyvalue", "variables", "last_record",
        "dialogue", "instructions", "recall", "word_count",
    )  # fmt: skip
    assert RETENTION == tuple(f"kvacc_{kind}{form}" for kind in kinds for form in ("", "_generate"))
    assert GROUPS == {"retention": RETENTION}
    assert set(task_names()) == {*BENCHMARKS, *SMOKE_TESTS, *RETENTION, "kvacc_longtext"}
    assert all("smoke test" in find_task(name).description for name in SMOKE_TESTS)


def test_unknown_task_names_the_nearest():
    with pytest.raises(KvaccError, match="did you mean 'hellaswag'"):
        find_task("helaswag")


def test_catalog_is_light_to_import():
    code = (
        "import sys, kvacc.task_catalog as catalog; catalog.task_names();"
        "sys.exit(any(m in sys.modules for m in ('torch', 'datasets', 'lm_eval.tasks', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---------------------------------------------------------------- loading


def test_every_task_loads_with_its_metrics_and_chance(items_folder):
    tasks = load_tasks(task_names(), data_dir=items_folder)
    assert list(tasks) == list(task_names())
    for name, task in tasks.items():
        info = find_task(name)
        assert task.config.task == name
        assert info.default_metric in task.higher_is_better()
        assert task.config.num_fewshot == 0
        if task.OUTPUT_TYPE == "multiple_choice":
            assert chance_level(task) == pytest.approx(info.chance)
        else:
            # A perplexity has no chance level.
            assert chance_level(task) is None and info.chance == (None if info.kind == "longtext" else 0.0)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_only_the_source_of_a_stock_task_changes(name, items_folder):
    """Prompt, options, target and metrics are those of lm-eval's own YAML."""
    from lm_eval.tasks._yaml_loader import load_yaml

    info = find_task(name)
    stock = load_yaml(loading.stock_yaml(info))
    assert load_tasks([name], data_dir=items_folder)[name].VERSION == stock["metadata"]["version"]
    for task in (
        load_tasks([name], data_dir=items_folder)[name],
        load_tasks([f"kvacc_mini_{name}"])[f"kvacc_mini_{name}"],
    ):
        for field in (
            *("doc_to_text", "doc_to_target", "doc_to_choice", "process_docs", "output_type"),
            *("metric_list", "target_delimiter", "fewshot_delimiter", "description"),
        ):
            mine = getattr(task.config, field)
            if field == "metric_list":
                # COPA and BoolQ leave aggregation to lm-eval's default, which is the mean.
                default = {"aggregation": "mean", "higher_is_better": True}
                assert [default | m for m in mine] == [default | m for m in stock[field]]
            elif field in stock:
                assert mine == stock[field], field
            else:
                assert not mine or mine.isspace(), field


@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_smoke_test_asks_as_the_benchmark_does(name, shots, items_folder):
    benchmark = load_tasks([name], data_dir=items_folder, num_fewshot=shots)[name]
    smoke = load_tasks([f"kvacc_mini_{name}"], num_fewshot=shots)[f"kvacc_mini_{name}"]
    assert [i.args for i in prompts(benchmark)] == [i.args for i in prompts(smoke)]


def test_a_second_load_gives_the_same_prompts(any_folder):
    for name in BENCHMARKS:
        first, second = (load_tasks([name], data_dir=any_folder, num_fewshot=4)[name] for _ in range(2))
        first.build_all_requests(limit=20)
        second.build_all_requests(limit=20)
        assert [i.args for i in first.instances] == [i.args for i in second.instances]
        other = load_tasks([name], data_dir=any_folder, num_fewshot=4, seed=5)[name]
        other.build_all_requests(limit=20)
        assert [i.args for i in other.instances] != [i.args for i in first.instances]


@pytest.mark.parametrize("sampler", ["default", "first_n"])
@pytest.mark.parametrize("name", [*BENCHMARKS, *SMOKE_TESTS])
def test_a_document_is_never_its_own_example(name, sampler, any_folder):
    task = load_tasks([name], data_dir=any_folder, num_fewshot=5, fewshot_sampler=sampler)[name]
    for instance in prompts(task, limit=40):
        question = task.doc_to_text(instance.doc)
        if isinstance(question, int):  # WinoGrande: the options stand in the prompt
            question = task.doc_to_choice(instance.doc)[instance.idx]
            question += f" {task.doc_to_target(instance.doc)}"
            assert question not in instance.args[0]
        else:
            assert instance.args[0].endswith(question)
            assert f"{question} " not in instance.args[0]


def test_first_n_shares_one_prefix(items_folder):
    task = load_tasks(["piqa"], data_dir=items_folder, num_fewshot=3, fewshot_sampler="first_n")["piqa"]
    built = prompts(task, limit=20)[20:]
    assert len({i.args[0].rpartition("\n\n")[0] for i in built}) == 1
    with pytest.raises(KvaccError, match="did you mean 'first_n'"):
        load_tasks(["piqa"], data_dir=items_folder, fewshot_sampler="firstn")
    with pytest.raises(KvaccError, match="num_fewshot -1 is negative"):
        load_tasks(["piqa"], data_dir=items_folder, num_fewshot=-1)


def test_loading_from_a_folder_reads_no_catalog_of_lm_eval(items_folder, monkeypatch):
    """lm-eval's 14,000 YAMLs would cost 15 s."""
    from lm_eval.tasks._index import TaskIndex

    read = []
    monkeypatch.setattr(TaskIndex, "process_cfg", lambda *arguments: read.append(arguments))
    load_tasks(["piqa", "kvacc_mini_copa"], data_dir=items_folder)
    assert not read


# ----------------------------------------------------- folders and the hub


def test_folder_comes_from_argument_then_environment(items_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KVACC_DATA_DIR", str(items_folder))
    piqa = find_task("piqa")
    assert piqa.source() is TaskSource.FOLDER
    assert piqa.available() == (True, f"data folder {items_folder}")
    assert not piqa.available(tmp_path)[0]
    monkeypatch.delenv("KVACC_DATA_DIR")
    assert piqa.source() is TaskSource.HUB
    assert find_task("kvacc_mini_piqa").available() == (True, "embedded in kvacc")


def test_missing_folder_or_file_is_one_clear_line(tmp_path):
    with pytest.raises(KvaccError, match="data folder '.*nowhere' does not exist"):
        load_tasks(["piqa"], data_dir=tmp_path / "nowhere")
    with pytest.raises(KvaccError, match="has no openbookqa/test.jsonl") as caught:
        load_tasks(["openbookqa"], data_dir=tmp_path)
    assert "\n" not in str(caught.value) and "kvacc_mini_openbookqa" in str(caught.value)


def test_unreadable_documents_are_one_clear_line(tmp_path):
    (tmp_path / "piqa").mkdir()
    file = tmp_path / "piqa" / "validation.jsonl"
    for text in ("{not json\n", '{"question": "other fields"}\n', ""):
        file.write_text(text)
        with pytest.raises(KvaccError, match="validation.jsonl could not be read as documents") as caught:
            load_tasks(["piqa"], data_dir=tmp_path)
        assert "\n" not in str(caught.value)


def test_changed_file_is_read_anew(tmp_path):
    copy_items(tmp_path)
    before = data_fingerprint(load_tasks(["piqa"], data_dir=tmp_path)["piqa"])
    file = tmp_path / "piqa" / "validation.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    task = load_tasks(["piqa"], data_dir=tmp_path)["piqa"]
    assert len(task.eval_docs) == 47 and data_fingerprint(task) != before


def test_unreachable_hub_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(loading, "hub_reachable", lambda: (False, "no route"))
    monkeypatch.setattr(loading, "no_network", lambda: None)
    with pytest.raises(
        KvaccError, match=r"from the hub \(no route\).*KVACC_DATA_DIR.*kvacc_mini_boolq"
    ) as caught:
        load_tasks(["boolq"])
    assert "\n" not in str(caught.value)


def test_offline_variables_are_honoured(monkeypatch):
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_reachable() == (False, "HF_HUB_OFFLINE is set")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "true")
    assert hub_reachable() == (False, "HF_DATASETS_OFFLINE is set")


@pytest.mark.parametrize(("status", "reachable"), [(200, True), (403, False)])
def test_hub_is_asked_at_its_endpoint(status, reachable, monkeypatch):
    import http.server
    import threading

    from huggingface_hub import constants

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments):
            """Keep the test's output clean."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        answer, reason = hub_reachable()
    finally:
        server.shutdown()
        server.server_close()
    assert answer is reachable and (reachable or "403" in reason)
    # Nobody listens there any more.
    assert hub_reachable()[0] is False


# ------------------------------------------------------------------ YAMLs


def test_written_yamls_serve_lm_eval_by_name(items_folder, tmp_path):
    from lm_eval.tasks import TaskManager

    folder = write_task_yamls(tmp_path / "yamls", items_folder)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    assert set(manager.all_tasks) == set(task_names())
    loaded = manager.load(["piqa", "kvacc_mini_hellaswag", "kvacc_passkey_generate"])["tasks"]
    own = load_tasks(loaded, data_dir=items_folder)
    for name, task in loaded.items():
        assert data_fingerprint(task) == data_fingerprint(own[name])


def test_written_yamls_leave_out_what_the_folder_lacks(items_folder, tmp_path, monkeypatch):
    shutil.copytree(items_folder / "copa", tmp_path / "data" / "copa")
    names = {path.stem for path in write_task_yamls(tmp_path / "some", tmp_path / "data").glob("*.yaml")}
    assert names == {"copa", *SMOKE_TESTS, *RETENTION, "kvacc_longtext"}
    monkeypatch.delenv("KVACC_DATA_DIR", raising=False)
    names = {path.stem for path in write_task_yamls(tmp_path / "none").glob("*.yaml")}
    assert names == {*SMOKE_TESTS, *RETENTION, "kvacc_longtext"}
    with pytest.raises(KvaccError, match="does not exist"):
        write_task_yamls(tmp_path / "x", tmp_path / "nowhere")


def test_only_task_options_of_a_command_line_reach_the_documents():
    """lm-eval hands the model's arguments to every task; ``seed`` is one of strategy ``random``."""
    from lm_eval.tasks import TaskManager

    metadata = {"seed": 9, "words": 5, "budget": 0.2, "strategy": "random", "version": 7}
    manager = TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=metadata)
    names = ["kvacc_passkey", "kvacc_keyvalue", "kvacc_mini_piqa"]
    own = load_tasks(names)
    for name, task in manager.load(names)["tasks"].items():
        assert data_fingerprint(task) == data_fingerprint(own[name])


def test_task_options_of_a_command_line_reach_the_documents(tiny_folder):
    """``--metadata '{"length": 600, ...}'``, and the model's name says whose tokens those are."""
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    options = {"length": 600, "items": 2, "depths": [0, 0.25], "facts": 5}
    metadata = {**options, "pretrained": str(tiny_folder)}
    manager = TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=metadata)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    for name, task in manager.load(["kvacc_multi_needle", "kvacc_passkey_generate"])["tasks"].items():
        taken = options if "needle" in name else {k: v for k, v in options.items() if k != "facts"}
        own = load_tasks([name], options=taken, tokenizer=tokenizer)[name]
        assert data_fingerprint(task) == data_fingerprint(own)
        docs = list(task.eval_docs)
        assert [doc["depth"] for doc in docs] == [0, 0.25] * 2
        for doc in docs:
            assert 588 <= len(tokenizer.encode(task.doc_to_text(doc))) <= 600


def test_a_named_tokenizer_that_is_not_there_is_an_error():
    """Any other would give other lengths than were asked for."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=str(tasks_folder()), include_defaults=False, metadata={"pretrained": "./nowhere"}
    )
    with pytest.raises(KvaccError, match="nowhere.*tokenizer is needed"):
        manager.load(["kvacc_passkey"])


# ----------------------------------------------------------------- options


def test_metrics_follow_the_depths():
    options = {"depths": [1, 0], "items": 1}
    names = ["kvacc_needle", "kvacc_needle_generate"]
    chosen, generated = load_tasks(names, options=options).values()
    assert list(chosen.higher_is_better()) == [
        "acc", "graded", "acc_depth_0", "graded_depth_0", "acc_depth_100", "graded_depth_100",
    ]  # fmt: skip
    assert set(generated.higher_is_better()) == {
        "exact_match", "graded", "exact_match_depth_0", "graded_depth_0", "exact_match_depth_100",
        "graded_depth_100",
    }  # fmt: skip
    assert set(chosen.aggregation()) == set(chosen.higher_is_better())
    assert set(load_tasks(["kvacc_word_count"])["kvacc_word_count"].aggregation()) == {"acc", "graded"}


def test_both_forms_ask_the_same():
    for kind in ("recall", "all_needles", "instructions"):
        chosen, generated = load_tasks(
            [f"kvacc_{kind}", f"kvacc_{kind}_generate"], options={"items": 2}
        ).values()
        assert list(chosen.eval_docs) == list(generated.eval_docs)
        assert [chosen.doc_to_text(doc) for doc in chosen.eval_docs] == [
            generated.doc_to_text(doc) for doc in generated.eval_docs
        ]


def test_generation_has_room_for_the_answer():
    for name, options in (
        ("kvacc_recall_generate", {"facts": 4}),
        ("kvacc_all_needles_generate", {"facts": 16}),
    ):
        task = load_tasks([name], options={**options, "length": 1024, "items": 1})[name]
        longest = max(1.3 * len(doc["answer"].split()) for doc in task.eval_docs)
        assert longest < task.config.generation_kwargs["max_gen_toks"] < longest + 20
        assert task.config.generation_kwargs["until"] == ["\n"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("kvacc_needle", {"lenght": 512}, "no option 'lenght' .did you mean 'length'"),
        ("kvacc_needle", {"length": 100}, "length=100 is refused: give a whole number of tokens from 256 to 131072"),
        ("kvacc_needle", {"length": "512"}, "length='512' is refused"),
        ("kvacc_needle", {"depths": [0.5, 1.5]}, "depth 1.5 is no share from 0 .start. to 1 .end."),
        ("kvacc_needle", {"depths": [0.125]}, "depth 0.125 is no share"),
        ("kvacc_needle", {"depths": [0.5, 0.5]}, "listed twice"),
        ("kvacc_needle", {"depths": []}, r"depths=\[\] is refused: give a list"),
        ("kvacc_needle", {"depths": 0.5}, "depths=0.5 is refused: give a list"),
        ("kvacc_needle", {"facts": 3}, "kvacc_needle takes no facts: there is one fact"),
        ("kvacc_word_count", {"depths": [0.5]}, "takes no depths: what it asks for is spread"),
        ("kvacc_word_count", {"filler": "book.txt"}, "takes no filler"),
        ("kvacc_instructions", {"depths": [0.5]}, "takes no depths: what it asks for stands at the start"),
        ("kvacc_keyvalue", {"facts": 6}, "facts=6 is refused for kvacc_keyvalue: give 4 to 256 records in steps of 4"),
        ("kvacc_multi_needle", {"facts": 65}, "give 4 to 64 needles"),
        ("kvacc_multi_needle", {"items": 0}, "items=0 is refused"),
        ("piqa", {"length": 512}, "piqa takes no options: length belongs to generated tasks"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_clear_line(name, options, says):
    with pytest.raises(KvaccError, match=says) as caught:
        load_tasks([name], options=options)
    assert "\n" not in str(caught.value)


def test_equal_questions_have_equal_options(tmp_path):
    needle = find_task("kvacc_needle")
    assert canonical_options(needle, {"length": 512, "items": 20, "depths": [0.9, 0.1, 0.5]}) == ({}, {})
    assert canonical_options(needle, {"depths": [1, 0], "length": 1024})[0] == {
        "length": 1024,
        "depths": [0, 1],
    }
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "book.txt").write_text("It rained. " * 900)
    here, there = (
        canonical_options(needle, {"filler": str(tmp_path / folder / "book.txt")})
        for folder in ("here", "there")
    )
    assert here[0] == there[0] and here[0]["filler"].startswith("book.txt@")
    assert str(tmp_path) not in str(here[0]) and here[1] == {"filler": str(tmp_path / "here" / "book.txt")}
    (tmp_path / "there" / "book.txt").write_text("It snowed. " * 900)
    assert canonical_options(needle, there[1])[0] != here[0]


# --------------------------------------------------- boundary of the context


def question_of(task, instance) -> str:
    """The last question of a prompt, as lm-eval renders it."""
    text = task.doc_to_text(instance.doc)
    return task.doc_to_choice(instance.doc)[instance.idx] if isinstance(text, int) else text


@pytest.mark.parametrize("shots", [0, 1, 5])
@pytest.mark.parametrize("name", [*BENCHMARKS, *SMOKE_TESTS, *RETENTION])
def test_context_ends_where_the_question_starts(name, shots, any_folder):
    few = {"length": 256, "items": 4} if name in RETENTION else None
    task = load_tasks([name], data_dir=any_folder, num_fewshot=shots, options=few)[name]
    for instance in prompts(task):
        prompt, doc = instance.args[0], instance.doc
        boundary = context_boundary(doc, prompt, shots)
        if name in RETENTION:
            assert prompt[boundary:] == f"\n{doc['question']}"
            assert prompt[:boundary].endswith(doc["context"])
        elif name.endswith("boolq"):
            assert prompt[boundary:] == f"\nQuestion: {doc['question']}?\nAnswer:"
        elif shots == 0:
            assert boundary is None
        else:
            assert prompt[boundary:] == question_of(task, instance)
            assert prompt[:boundary].endswith("\n\n")


def chatty(turns, add_generation_prompt=True, **_) -> str:
    """A chat template in SmolLM2's style, which trims what a turn says."""
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content'].strip()}<|im_end|>\n" for turn in turns)
    return text + "<|im_start|>assistant\n" * add_generation_prompt


def blank_lined(turns, add_generation_prompt=True, **_) -> str:
    """A chat template in Llama 3's style, full of blank lines."""
    text = "".join(f"<|start|>{turn['role']}<|end|>\n\n{turn['content'].strip()}<|eot|>" for turn in turns)
    return text + "<|start|>assistant<|end|>\n\n" * add_generation_prompt


@pytest.mark.parametrize("multiturn", [True, False])
@pytest.mark.parametrize("template", [chatty, blank_lined])
@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("name", [*SMOKE_TESTS, "kvacc_passkey", "kvacc_keyvalue_generate"])
def test_context_is_found_inside_a_chat_template(name, shots, template, multiturn):
    task = load_tasks([name], num_fewshot=shots)[name]
    options = {"apply_chat_template": True, "chat_template": template, "fewshot_as_multiturn": multiturn}
    for instance in prompts(task, limit=6, **options):
        prompt, doc = instance.args[0], instance.doc
        boundary = context_boundary(doc, prompt, shots)
        if "context" in doc:
            assert prompt[:boundary].endswith(doc["context"])
            assert prompt[boundary:].startswith(f"\n{doc['question']}")
        elif "passage" in doc:
            assert prompt[boundary:].startswith(f"\nQuestion: {doc['question']}?\nAnswer:")
        elif shots == 0:
            assert boundary is None
        else:
            question = question_of(task, instance)
            assert prompt[boundary:].startswith(question)
            assert prompt.count(question, boundary) == 1


def test_blank_lines_in_the_question_do_not_move_the_boundary():
    examples = "Question: a\nAnswer: b\n\nQuestion: c\nAnswer: d\n\n"
    doc = {"goal": "How do I\n\nbake?", "sol1": "x", "sol2": "y", "label": 0}
    prompt = f"{examples}Question: How do I\n\nbake?\nAnswer:"
    assert context_boundary(doc, prompt, 2) == len(examples)


def test_boundary_of_a_format_unknown_to_the_catalog():
    examples = "Q: one\nA: 1\n\nQ: two\nA: 2\n\n"
    doc = {"input": "What comes after these\n\nblank lines?", "answer": "3"}
    # As many blank lines as examples: the last one ends the last example.
    assert context_boundary({"input": "three"}, f"{examples}Q: three\nA:", 2) == len(examples)
    # More: only the document's own text tells an example's end from a question's middle.
    asked = f"{examples}Q: {doc['input']}\nA:"
    assert context_boundary(doc, asked, 2) == len(examples)
    assert context_boundary({"answer": "3"}, asked, 2) is None
    # A description before the examples.
    assert context_boundary(doc, f"Answer well.\n\n{asked}", 2) == len(f"Answer well.\n\n{examples}")
    # Fewer: the examples end some other way.
    assert context_boundary(doc, "Q: one A: 1\nQ: two A: 2\nQ: three A:", 2) is None
    assert context_boundary({}, "anything", 0) is None
    assert context_boundary({}, "anything", None) is None


def test_context_that_ends_the_prompt_is_no_boundary():
    """Nothing would be left to read against the compressed cache."""
    assert context_boundary({"context": "Once upon a time"}, "Once upon a time", 0) is None
    assert context_boundary({"context": "gone"}, "Once upon a time", 0) is None
    assert context_boundary({"context": ""}, "Once upon a time", 0) is None
    assert context_boundary({"context": ["not", "text"]}, "Once upon a time", 0) is None


@pytest.mark.parametrize(
    ("opening", "options"),
    [("Ann saw Bo and Bob when ", ("Bo", "Bob")), ("", ("car", "race car")), ("", ("race car", "car"))],
)
def test_options_that_contain_one_another_do_not_confuse_the_boundary(opening, options):
    doc = {"sentence": f"{opening}_ left early.", "option1": options[0], "option2": options[1], "answer": "1"}
    for option in options:
        for other in options:
            examples = f"{opening}{other} left early.\n\n"
            assert context_boundary(doc, f"{examples}{opening}{option}", 1) == len(examples)


# ------------------------------------------- clusters, fingerprints, chance


def test_documents_of_one_passage_or_twin_share_a_cluster():
    for name, pairs in (("kvacc_mini_boolq", 24), ("kvacc_mini_winogrande", 24), ("kvacc_mini_piqa", 48)):
        docs = load_tasks([name])[name].eval_docs
        keys = [cluster_key(name, doc, index) for index, doc in enumerate(docs)]
        assert len(set(keys)) == pairs
    assert keys[0] == "kvacc_mini_piqa/0"


def test_cluster_key_of_videos_and_haystacks():
    doc = {"source_id": "video-1", "ctx": "a"}
    assert cluster_key("hellaswag", doc, 0) == cluster_key("hellaswag", doc | {"ctx": "b"}, 1)
    assert cluster_key("hellaswag", doc, 0) != cluster_key("other", doc, 0)
    assert cluster_key("hellaswag", {"source_id": ""}, 3) == "hellaswag/3"
    first, second = {"context": "hay", "question": "a"}, {"context": "hay", "question": "b"}
    assert cluster_key("t", first, 0) == cluster_key("t", second, 1) != cluster_key("t", {"context": "x"}, 2)


def test_fingerprint_follows_the_documents_alone():
    one, other = (load_tasks(["kvacc_mini_copa"], num_fewshot=n)["kvacc_mini_copa"] for n in (0, 2))
    assert data_fingerprint(one) == data_fingerprint(other)
    assert data_fingerprint(one, limit=10) != data_fingerprint(one)
    assert data_fingerprint(one, limit=10) == data_fingerprint(other, limit=10)
    assert data_fingerprint(one, limit=1000) == data_fingerprint(one)
    assert data_fingerprint(one) != data_fingerprint(load_tasks(["kvacc_mini_piqa"])["kvacc_mini_piqa"])


def test_chance_counts_the_options_of_each_document():
    class Varying:
        OUTPUT_TYPE = "multiple_choice"
        eval_docs = [{"options": ["a", "b"]}, {"options": ["a", "b", "c", "d"]}]

        def doc_to_choice(self, doc):
            return doc["options"]

    assert chance_level(Varying()) == pytest.approx((1 / 2 + 1 / 4) / 2)


@pytest.mark.skipif(not REAL_DATA, reason="KVACC_TEST_DATA_DIR names no folder with real data")
def test_real_data_has_the_expected_chance_and_size():
    tasks = load_tasks(BENCHMARKS, data_dir=REAL_DATA)
    for name, task in tasks.items():
        path = find_task(name).data_file(REAL_DATA)
        assert len(task.eval_docs) == sum(1 for line in path.read_text().splitlines() if json.loads(line))
        assert chance_level(task) == pytest.approx(find_task(name).chance)
