"""Commands as processes, with the default model."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROMPT = "The capital of France is"
GREEDY = ["--temperature", "0", "--max-tokens", "12", "--kv-cache-gb", "0.1"]


def environment(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "storage")))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}


def run(*line: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(
        [sys.executable, "-m", "metrale_async", *line],
        input=stdin,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished


@pytest.fixture(scope="module")
def answer(smollm2_gguf: Path) -> str:
    """The greedy answer to PROMPT, as printed by generate."""
    return run("generate", *GREEDY, PROMPT).stdout


def test_generate_prints_the_answer_and_nothing_else(answer: str) -> None:
    assert "Paris" in answer
    assert answer.endswith("\n")


def test_generate_reads_standard_input_and_prints_json(answer: str) -> None:
    output = json.loads(run("generate", *GREEDY, "--json", stdin=PROMPT).stdout)
    assert output["text"] + "\n" == answer
    assert output["model"] == "smollm2-135m"
    assert output["usage"]["completion_tokens"] == len(output["token_ids"]) <= 12
    assert output["usage"]["prompt_tokens"] == len(output["prompt_token_ids"])
    assert output["finish_reason"] in ("stop", "length")


def test_generate_refuses_a_prompt_that_does_not_fit_with_both_numbers(smollm2_gguf: Path) -> None:
    refused = run("generate", "--max-seq-len", "16", "--kv-cache-gb", "0.1", "--max-tokens", "16", PROMPT, code=1)
    assert refused.stdout == ""
    assert "16" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_model_that_is_not_there_is_refused_in_one_line() -> None:
    refused = run("generate", "--model", "no-such-model", PROMPT, code=1)
    assert "no-such-model" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_chat_over_a_pipe_answers_each_line_and_remembers(smollm2_gguf: Path) -> None:
    talk = "My name is Ada. What is my name?\n/reset\nMy name is Ada. What is my name?\n"
    answers = run("chat", *GREEDY, stdin=talk).stdout.splitlines()
    assert len(answers) >= 2
    assert answers[: len(answers) // 2] == answers[len(answers) // 2 :], (
        "after /reset the same question, the same answer"
    )


def test_chat_in_a_terminal_streams_stops_on_interrupt_and_leaves_at_the_end_of_input(smollm2_gguf: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "metrale_async", "chat", "--ignore-eos", "--kv-cache-gb", "0.1"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment(TERM="xterm"), start_new_session=True
    )
    os.close(slave)
    terminal = Terminal(master)
    try:
        terminal.wait_for("> ")
        terminal.type("Tell me a very long story.\n")
        terminal.wait_for("\n", times=2)  # the echo's end, then something of the answer
        terminal.wait_for(" ", times=20)
        process.send_signal(signal.SIGINT)
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.type("/help\n")
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("\x04")
        terminal.read_to_end()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


class Terminal:
    """The other side of a pseudo-terminal; what was waited for is consumed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        for _ in range(times):
            while text not in self._unread:
                self._unread += os.read(self._descriptor, 4096).decode("utf-8", "replace")
            self._unread = self._unread.partition(text)[2]

    def read_to_end(self) -> None:
        with contextlib.suppress(OSError):  # Linux says EIO when the last writer is gone
            while os.read(self._descriptor, 4096):
                pass


def test_models_pull_prints_where_the_model_lies(smollm2_gguf: Path) -> None:
    assert run("models", "pull", "smollm2-135m").stdout.strip() == str(smollm2_gguf)


def test_models_list_knows_the_catalogue_and_what_is_fetched(smollm2_gguf: Path) -> None:
    listed = {model["name"]: model for model in json.loads(run("models", "list", "--json").stdout)}
    assert listed["smollm2-135m"]["path"] == str(smollm2_gguf)
    assert listed["smollm2-135m"]["size_bytes"] == smollm2_gguf.stat().st_size


def test_doctor_says_what_it_would_choose(smollm2_gguf: Path) -> None:
    report = json.loads(run("doctor", "--device", "cpu", "--kv-cache-gb", "0.1", "--json").stdout)
    assert report["machine"]["usable_cores"] >= 1
    assert report["device"]["name"] == "cpu"
    assert report["kernels"]["name"] in ("cpu", "reference")
    assert report["kernels"]["reason"]
    assert report["disk_io"]["name"] in ("io_uring", "threads")
    assert report["disk_io"]["reason"]
    memory = report["memory"]
    assert 0 < memory["kv_cache_bytes"] <= 0.1 * 2**30
    assert memory["tokens"] == memory["num_blocks"] * 16
    assert memory["max_seq_len"] == 8192


def test_doctor_tells_the_rest_when_one_question_has_no_answer(smollm2_gguf: Path) -> None:
    report = json.loads(run("doctor", "--device", "cuda", "no-such-model", "--json", code=1).stdout)
    assert "no-such-model" in report["memory"]["problem"]
    assert report["machine"]["memory_bytes"] > 0
