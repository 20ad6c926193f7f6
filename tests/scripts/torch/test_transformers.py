"""Hugging Face models, trained by loops of people's own."""

import pytest
import torch
import transformers
from transformers import get_cosine_schedule_with_warmup

import lockstep
from scripts.compare import check_port
from scripts.torch.loops import draw, draw_tokens, read

TOKENS = draw_tokens(12, 9)
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert():
    """A classifier."""
    config = transformers.BertConfig(**TINY, **WITHOUT_DROPOUT, max_position_embeddings=16, num_labels=3)
    return transformers.BertForSequenceClassification(config), {"input_ids": TOKENS, "labels": torch.arange(12) % 3}


def llama():
    """A language model."""
    config = transformers.LlamaConfig(**TINY, num_key_value_heads=1, max_position_embeddings=16)
    return transformers.LlamaForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS}


def mixtral():
    """A mixture of experts, whose loss has a part of its router's outputs, which hooks record."""
    config = transformers.MixtralConfig(
        **TINY, num_key_value_heads=1, num_local_experts=4, max_position_embeddings=16, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS}


def vit():
    """An image classifier."""
    config = {name: value for name, value in TINY.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**config, **WITHOUT_DROPOUT, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": draw(12, 3, 8, 8),
        "labels": torch.arange(12) % 3,
    }


def wav2vec2():
    """A classifier of sounds, whose positions come from a convolution with weight norm."""
    config = transformers.Wav2Vec2Config(
        **TINY,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
        **dict.fromkeys(("layerdrop", "final_dropout", "mask_time_prob"), 0.0),
        num_labels=3,
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    return model, {"input_values": draw(12, 400), "labels": torch.arange(12) % 3}


@pytest.mark.parametrize("create", [bert, llama, mixtral, vit, wav2vec2])
def test_a_model_with_its_own_loss(create):
    """Three lines for four: `wrap`, and `trainer.step(batch)` for forward, backward and the optimizer's two calls.

    The schedule stays, because a step reads the learning rate.
    """

    def start():
        torch.manual_seed(0)
        model, batch = create()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, batch, optimizer, get_cosine_schedule_with_warmup(optimizer, 1, 4)

    def plain():
        model, batch, optimizer, schedule = start()
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return read(model)

    def port(devices, shards):
        model, batch, optimizer, schedule = start()
        with lockstep.wrap(model, optimizer, devices=devices, shards=shards) as trainer:
            for _ in range(3):
                trainer.step(batch, verbose=0)
                schedule.step()
        return read(model)

    check_port(plain, port)


@pytest.mark.parametrize("tried_before", [False, True])
def test_an_objective_on_hidden_states(tried_before):
    """An objective with the loop's own lines, `wrap` and `step`.

    transformers records hidden states by hooks that the first such pass installs, which may be the script's.
    """

    def start():
        torch.manual_seed(0)
        model, batch = llama()
        if tried_before:
            model(**batch, output_hidden_states=True)
        return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compute_loss(model, batch):
        outputs = model(**batch, output_hidden_states=True)
        return outputs.loss + outputs.hidden_states[1].pow(2).mean()

    def plain():
        model, batch, optimizer = start()
        for _ in range(3):
            compute_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return read(model)

    def port(devices, shards):
        model, batch, optimizer = start()
        objective = lockstep.objective(compute_loss)
        with lockstep.wrap(model, optimizer, objective, devices=devices, shards=shards) as trainer:
            for _ in range(3):
                trainer.step(batch, verbose=0)
        return read(model)

    check_port(plain, port)
