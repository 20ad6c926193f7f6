"""Pipelines on their way: sent once, dropped when gone, sent again after a failure."""

import gc

import numpy as np

from lockstep.core.batches import Rows
from lockstep.data import arrays
from lockstep.processes.pipeline_transfer import PipelineReceiver, PipelineSender


def made(offset=0):
    return arrays(np.arange(8) + offset).map(lambda x: x).batch(4)


def test_a_pipeline_is_sent_once_and_known_by_its_number():
    shipper, shipped = PipelineSender(), PipelineReceiver()
    one, other = made(), made(10)
    rows = [shipper.numbered(Rows(each, 0, 1, 4)) for each in (one, other, one)]
    assert [each.pipeline for each in rows] == [0, 1, 0]
    freight = shipper.freight()
    assert list(freight.new) == [0, 1]
    shipped.take(freight)
    there = shipped.known(rows[0]).pipeline
    assert [batch.tolist() for batch in there] == [batch.tolist() for batch in one]
    shipper.numbered(Rows(one, 0, 2, 4))
    assert shipper.freight() == ({}, ())
    shipper.again()  # a worker failed on the command that brought them
    shipped.take(shipper.freight())
    assert shipped.known(rows[0]).pipeline is there
    shipper.close()


def test_a_pipeline_that_is_gone_is_told_once():
    shipper, shipped = PipelineSender(), PipelineReceiver()
    pipeline = made()
    number = shipper.numbered(Rows(pipeline, 0, 0, 4)).pipeline
    shipped.take(shipper.freight())
    del pipeline
    gc.collect()
    freight = shipper.freight()
    assert freight == ({}, (number,))
    shipped.take(freight)
    assert shipped._pipelines == {}
    assert shipper.freight() == ({}, ())
    shipper.close()


def test_what_arrives_may_be_written_to_and_nobody_else_sees_it():
    shipper, shipped = PipelineSender(), PipelineReceiver()
    pipeline = made()
    rows = shipper.numbered(Rows(pipeline, 0, 0, 4))
    shipped.take(shipper.freight())
    shipped.known(rows).pipeline.input.arrays[:] = -1
    again = PipelineReceiver()
    shipper.again()
    again.take(shipper.freight())
    assert again.known(rows).pipeline.input.arrays.tolist() == list(range(8))
    shipper.close()
