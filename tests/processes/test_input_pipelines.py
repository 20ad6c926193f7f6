"""Pipelines on their way: each worker gets what it lacks, drops what is gone, and gets it again after a failure."""

import gc

import numpy as np

from lockstep.core.batches import Rows
from lockstep.data import arrays
from lockstep.processes.input_pipelines import PipelineReceiver, PipelineSender


def made(offset=0):
    return arrays(np.arange(8) + offset).map(lambda x: x).batch(4)


def test_a_pipeline_is_sent_once_and_known_by_its_number():
    sender, receiver = PipelineSender(), PipelineReceiver()
    one, other = made(), made(10)
    rows = [sender.number(Rows(each, 0, 1, 4)) for each in (one, other, one)]
    assert [each.pipeline for each in rows] == [0, 1, 0]
    changes = sender.list_changes(set())
    assert list(changes.new) == [0, 1]
    receiver.apply(changes)
    there = receiver.restore(rows[0]).pipeline
    assert [batch.tolist() for batch in there] == [batch.tolist() for batch in one]
    sender.number(Rows(one, 0, 2, 4))
    assert sender.list_numbers() == {0, 1}
    assert sender.list_changes({0, 1}) == ({}, ())
    assert list(sender.list_changes({0}).new) == [1]  # to a worker that joined later, or failed on its command
    receiver.apply(sender.list_changes(set()))
    assert receiver.restore(rows[0]).pipeline is there
    sender.close()


def test_a_pipeline_that_is_gone_is_told_once():
    sender, receiver = PipelineSender(), PipelineReceiver()
    pipeline = made()
    number = sender.number(Rows(pipeline, 0, 0, 4)).pipeline
    receiver.apply(sender.list_changes(set()))
    known = sender.list_numbers()
    del pipeline
    gc.collect()
    changes = sender.list_changes(known)
    assert changes == ({}, (number,))
    receiver.apply(changes)
    assert len(receiver) == 0
    assert sender.list_changes(sender.list_numbers()) == ({}, ())
    assert sender.list_changes(set()) == ({}, ())  # a worker that never had it is not told
    sender.close()


def test_what_arrives_may_be_written_to_and_nobody_else_sees_it():
    sender, receiver = PipelineSender(), PipelineReceiver()
    pipeline = made()
    rows = sender.number(Rows(pipeline, 0, 0, 4))
    receiver.apply(sender.list_changes(set()))
    receiver.restore(rows).pipeline.input.arrays[:] = -1
    again = PipelineReceiver()
    again.apply(sender.list_changes(set()))
    assert again.restore(rows).pipeline.input.arrays.tolist() == list(range(8))
    sender.close()
