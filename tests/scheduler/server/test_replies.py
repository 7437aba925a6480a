"""Responses: the chunks of a stream together are the whole response, however it is cut."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.request import TokenLogprob
from radixkv.scheduler.server.replies import ChatReply, CompletionReply, TokenNames, usage
from radixkv.scheduler.serving.outputs import GenerationOutput, PrefixHits

HEAD = {"id": "a", "created": 7, "model": "m"}
PROMPT = (3, 4)


def record(token: int, rank: int, num_top: int) -> TokenLogprob:
    """A record with a distinct number for everything; of rank 1, with one that JSON has not."""
    top = tuple((token + number, -float(number) / 4) for number in range(num_top))
    return TokenLogprob(token, float("-inf") if rank == 1 else -rank / 8, rank, top)


records = st.builds(record, st.integers(0, 2000), st.integers(1, 9), st.integers(0, 3))
samples = st.lists(st.lists(records, min_size=1, max_size=5), min_size=1, max_size=3)


def output(index: int, tokens: list[TokenLogprob], taken: int, end: int, **more: Any) -> Any:
    """The output of the first `end` tokens, of which `taken` were told before."""
    told = [chr(97 + each.token_id % 26) for each in tokens]
    return GenerationOutput(
        request_id=more.pop("name", "r"),
        index=index,
        num_prompt_tokens=more.pop("num_prompt_tokens", len(PROMPT)),
        text="".join(told[:end]),
        new_text="".join(told[taken:end]),
        token_ids=tuple(each.token_id for each in tokens[:end]),
        new_token_ids=tuple(each.token_id for each in tokens[taken:end]),
        finish_reason="length" if end == len(tokens) else None,
        hits=more.pop("hits", PrefixHits()),
        **more,
    )


def entry(token: int, logprob: float) -> dict[str, Any]:
    name = f"token_id:{token}"
    return {"token": name, "logprob": max(logprob, -9999.0), "bytes": list(name.encode())}


def completion_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    names = [f"token_id:{each.token_id}" for each in tokens]
    return {
        "text_offset": [len("".join(names[:index])) for index in range(len(names))],
        "tokens": names,
        "token_logprobs": [max(each.logprob, -9999.0) for each in tokens],
        "top_logprobs": [
            {
                f"token_id:{token}": max(logprob, -9999.0)
                for token, logprob in [*each.top, (each.token_id, each.logprob)]
            }
            for each in tokens
        ],
    }


def chat_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    content = [
        {**entry(each.token_id, each.logprob), "top_logprobs": [entry(*top) for top in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def join(into: dict[str, Any], new: dict[str, Any]) -> None:
    """Add the logprobs of a chunk to those before."""
    for name, values in new.items():
        into[name] = [*into.get(name, []), *values] if isinstance(values, list) else values


def make_reply(is_chat: bool, has_ids: bool, num_choices: int) -> ChatReply | CompletionReply:
    names = TokenNames(None)
    if is_chat:
        return ChatReply(HEAD, PROMPT, names, has_token_ids=has_ids, num_choices=num_choices)
    return CompletionReply(HEAD, [PROMPT] * num_choices, names, has_token_ids=has_ids)


@given(samples, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_a_whole_response_has_every_field_of_every_choice(
    tokens: list[list[TokenLogprob]], is_chat: bool, has_ids: bool, has_logprobs: bool, asks: bool
) -> None:
    prompt: Any = (None, *tokens[0]) if asks else None
    outputs = [
        output(
            index,
            each,
            0,
            len(each),
            logprobs=tuple(each) if has_logprobs else None,
            prompt_logprobs=None if index else prompt,
        )
        for index, each in enumerate(tokens)
    ]
    expected: list[dict[str, Any]] = []
    of_prompt = [
        None
        if each is None
        else {
            **{
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": f"token_id:{token}"}
                for rank, (token, logprob) in enumerate(each.top, 1)
            },
            str(each.token_id): {
                "logprob": max(each.logprob, -9999.0),
                "rank": each.rank,
                "decoded_token": f"token_id:{each.token_id}",
            },
        }
        for each in prompt or ()
    ]
    told = chat_logprobs if is_chat else completion_logprobs
    for index, each in enumerate(tokens):
        text = outputs[index].text
        message = {"message": {"role": "assistant", "content": text}}
        ids = {"token_ids": outputs[index].token_ids} if has_ids else {}
        choice = {
            "index": index,
            **(message if is_chat else {"text": text}),
            "logprobs": told(each) if has_logprobs else None,
            "finish_reason": "length",
            **ids,
        }
        if not is_chat:
            choice |= {"prompt_token_ids": PROMPT} if has_ids else {}
            choice |= {"prompt_logprobs": of_prompt} if asks and not index else {}
        expected.append(choice)
    kind = "chat.completion" if is_chat else "text_completion"
    whole: dict[str, Any] = {**HEAD, "object": kind, "choices": expected}
    if is_chat:
        whole |= {"prompt_token_ids": PROMPT} if has_ids else {}
        whole |= {"prompt_logprobs": of_prompt} if asks else {}
    assert make_reply(is_chat, has_ids, len(tokens)).whole(outputs) == whole


@given(st.data(), samples, st.booleans(), st.booleans(), st.booleans())
def test_the_chunks_of_a_stream_are_the_whole_response(
    data: st.DataObject,
    tokens: list[list[TokenLogprob]],
    is_chat: bool,
    has_ids: bool,
    has_logprobs: bool,
) -> None:
    reply = make_reply(is_chat, has_ids, len(tokens))
    taken = [0] * len(tokens)
    chunks = reply.opening()
    if is_chat:
        roles = [chunk["choices"] for chunk in chunks]
        assert roles == [
            [
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ]
            for index in range(len(tokens))
        ]
        told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        assert told == ([PROMPT] if has_ids else []) and chunks[0].get("prompt_token_ids") in (
            PROMPT,
            None,
        )
    else:
        assert chunks == []
    texts, ids = [""] * len(tokens), [()] * len(tokens)
    prompts: list[list[Any]] = [[] for _ in tokens]
    logprobs: list[dict[str, Any]] = [{} for _ in tokens]
    while open_ := [index for index, each in enumerate(tokens) if taken[index] < len(each)]:
        index = data.draw(st.sampled_from(open_))
        each, before = tokens[index], taken[index]
        end = data.draw(st.integers(before + 1, len(each)))
        taken[index] = end
        so_far = tuple(each[:end]) if has_logprobs else None
        chunk = reply.chunk(index, output(index, each, before, end, logprobs=so_far))
        assert {**chunk, "choices": []} == reply.last()
        [choice] = chunk["choices"]
        assert choice["index"] == index
        assert choice["finish_reason"] == ("length" if end == len(each) else None)
        texts[index] += choice["delta"]["content"] if is_chat else choice["text"]
        assert ("token_ids" in choice, choice["logprobs"] is not None) == (has_ids, has_logprobs)
        ids[index] += choice.get("token_ids", ())
        if not is_chat and has_ids:
            prompts[index].append(choice["prompt_token_ids"])
        if has_logprobs:
            join(logprobs[index], choice["logprobs"])
    wholes = [output(index, each, 0, len(each)) for index, each in enumerate(tokens)]
    assert texts == [whole.text for whole in wholes]
    told_logprobs = chat_logprobs if is_chat else completion_logprobs
    if has_ids:
        assert ids == [whole.token_ids for whole in wholes]
    if has_logprobs:
        assert logprobs == [told_logprobs(each) for each in tokens]
    if has_ids and not is_chat:
        assert all(first == PROMPT and not any(rest) for first, *rest in prompts)


def test_the_last_chunks_have_no_choices_and_no_new_text_no_content() -> None:
    for is_chat, kind in ((True, "chat.completion.chunk"), (False, "text_completion")):
        assert make_reply(is_chat, False, 1).last() == {**HEAD, "object": kind, "choices": []}
    empty = output(0, [], 0, 0)
    assert make_reply(True, False, 1).chunk(0, empty)["choices"][0]["delta"] == {}


@given(st.data())
def test_usage_counts_every_sample_and_each_prompt_once(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), max_size=3))
    outputs, num_new = [], 0
    for number, (num_prompt_tokens, num_samples) in enumerate(sizes):
        for index in range(num_samples):
            tokens = data.draw(st.lists(records, max_size=4))
            num_new += len(tokens)
            # Samples after the first hit blocks that it has computed.
            hits = PrefixHits(1 + 100 * index, 2, 4 * number)
            more = {"name": str(number), "num_prompt_tokens": num_prompt_tokens, "hits": hits}
            outputs.append(output(index, tokens, 0, len(tokens), **more))
    num_prompt = sum(size for size, _ in sizes)
    assert usage(data.draw(st.permutations(outputs))) == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {
            "cached_tokens": sum(3 + 4 * number for number in range(len(sizes)))
        },
    }
