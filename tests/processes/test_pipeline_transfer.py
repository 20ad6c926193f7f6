"""Pipelines on their way: sent once, dropped when gone, sent again after a failure."""

import gc

import numpy as np

from lockstep.core.batches import Rows
from lockstep.data import arrays
from lockstep.processes.pipeline_transfer import PipelineReceiver, PipelineSender


def made(offset=0):
    return arrays(np.arange(8) + offset).map(lambda x: x).batch(4)


def test_a_pipeline_is_sent_once_and_known_by_its_number():
    sender, receiver = PipelineSender(), PipelineReceiver()
    one, other = made(), made(10)
    rows = [sender.number(Rows(each, 0, 1, 4)) for each in (one, other, one)]
    assert [each.pipeline for each in rows] == [0, 1, 0]
    changes = sender.take_changes()
    assert list(changes.new) == [0, 1]
    receiver.apply(changes)
    there = receiver.restore(rows[0]).pipeline
    assert [batch.tolist() for batch in there] == [batch.tolist() for batch in one]
    sender.number(Rows(one, 0, 2, 4))
    assert sender.take_changes() == ({}, ())
    sender.repeat()  # a worker failed on the command that brought them
    receiver.apply(sender.take_changes())
    assert receiver.restore(rows[0]).pipeline is there
    sender.close()


def test_a_pipeline_that_is_gone_is_told_once():
    sender, receiver = PipelineSender(), PipelineReceiver()
    pipeline = made()
    number = sender.number(Rows(pipeline, 0, 0, 4)).pipeline
    receiver.apply(sender.take_changes())
    del pipeline
    gc.collect()
    changes = sender.take_changes()
    assert changes == ({}, (number,))
    receiver.apply(changes)
    assert len(receiver) == 0
    assert sender.take_changes() == ({}, ())
    sender.close()


def test_what_arrives_may_be_written_to_and_nobody_else_sees_it():
    sender, receiver = PipelineSender(), PipelineReceiver()
    pipeline = made()
    rows = sender.number(Rows(pipeline, 0, 0, 4))
    receiver.apply(sender.take_changes())
    receiver.restore(rows).pipeline.input.arrays[:] = -1
    again = PipelineReceiver()
    sender.repeat()
    again.apply(sender.take_changes())
    assert again.restore(rows).pipeline.input.arrays.tolist() == list(range(8))
    sender.close()
