from ackcore._reference import RawMessages as RawMessages
from ackcore._reference import RecordBuffers as RecordBuffers
