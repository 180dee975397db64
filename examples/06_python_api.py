"""The engine as a library: generate, score and embed from Python. Results are returned, not saved."""

import weightstream

with weightstream.Runtime(model="tiny", offload="nvme", max_new_tokens=12) as runtime:
    prompts = [
        "Q: What is 94 + 78?\nA:",
        weightstream.Prompt("Q: Say backwards: brave soup milk snow\nA:", id="backwards", max_new_tokens=3),
        "",  # an invalid prompt gives a result with an error
    ]
    for completion in runtime.generate(prompts):
        print(completion.id, repr(completion.text) if completion.is_ok else f"error: {completion.error}")

    for scored in runtime.score([("Q: What is 7 + 5?\nA:", [" 12", " 11"])]):
        print(f"target {scored.target_index}: {scored.logprob:.2f}, greedy: {scored.is_greedy}")

    first, second = runtime.embed(["A white boat.", "A black boat."], pooling="mean", normalize=True)
    print(f"{len(first.vector)} numbers, similarity {first.vector @ second.vector:.2f}")
