"""Where generation ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_train.domains.language.generation import continuing, ends
from tests.domains.language import tiny


@pytest.mark.parametrize(("before", "after"), [(None, [7]), (3, [3, 7]), ([3, 5], [3, 5, 7]), (7, 7), ([7, 3], [7, 3])])
def test_the_end_of_an_answer_is_added_once(before: int | list[int] | None, after: int | list[int]) -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    model.generation_config.eos_token_id = before
    notices = ends.end_answers(model, 7, tokenizer)
    assert model.generation_config.eos_token_id == after
    assert len(notices) == (before != after)
    assert all(repr(tokenizer.convert_ids_to_tokens(7)) in notice for notice in notices)


def test_generation_stops_there(tmp_path: Path) -> None:
    """Also of a model that reads it from the files beside adapters, whose base has another end."""
    model = tiny.model()
    drawing = continuing.Drawing(0, "x", 0, temperature=0)
    whole = continuing.continue_tokens(model, [5, 6], drawing, 8, pad_id=2)
    assert len(whole) == 8
    assert ends.end_answers(model, None, tiny.tokenizer()) == []
    ends.end_answers(model, whole[2], tiny.tokenizer())
    written = continuing.continue_tokens(model, [5, 6], drawing, 8, pad_id=2)
    assert written == whole[: whole.index(whole[2]) + 1]
    model.generation_config.save_pretrained(tmp_path)
    other = tiny.model()
    ends.add_saved_ends(other, tmp_path / "none")
    assert continuing.continue_tokens(other, [5, 6], drawing, 8, pad_id=2) == whole
    ends.add_saved_ends(other, tmp_path)
    assert continuing.continue_tokens(other, [5, 6], drawing, 8, pad_id=2) == written
