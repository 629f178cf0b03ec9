import java.io.IOException;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import org.apache.storm.daemon.Acker;
import org.apache.storm.generated.GlobalStreamId;
import org.apache.storm.task.GeneralTopologyContext;
import org.apache.storm.task.IOutputCollector;
import org.apache.storm.task.OutputCollector;
import org.apache.storm.tuple.Fields;
import org.apache.storm.tuple.MessageId;
import org.apache.storm.tuple.Tuple;
import org.apache.storm.tuple.Values;

/**
 * Storm's own acker, fed from columns in files.
 *
 * <p>Arguments: a folder with root_ids, vals and tasks as raw little-endian columns, how many rows age
 * the acker, and "fresh" or "reused". It warms the JIT up on an acker that it throws away, ages
 * another one, and then answers lines from standard input: "FROM TO" applies those rows, writes the
 * roots acked to the file "acked", and prints the nanoseconds of CPU time that the thread took. Fresh
 * tuples and values are made for each message, as in a worker; a reused one spares the acker that
 * garbage. Storm's transfer and serialisation are in neither.
 */
public final class AckerBench {
    private static final int WARM_UP = 4_000_000;
    private static final ThreadMXBean THREADS = ManagementFactory.getThreadMXBean();

    private final long[] rootIds;
    private final long[] vals;
    private final int[] tasks;
    private final long[] acked;
    private final boolean reuse;
    private int ackedCount;
    private Acker acker;

    private AckerBench(Path folder, boolean reuse) throws IOException {
        ByteBuffer bytes = read(folder.resolve("root_ids"));
        rootIds = new long[bytes.remaining() / Long.BYTES];
        bytes.asLongBuffer().get(rootIds);
        vals = new long[rootIds.length];
        read(folder.resolve("vals")).asLongBuffer().get(vals);
        tasks = new int[rootIds.length];
        read(folder.resolve("tasks")).asIntBuffer().get(tasks);
        acked = new long[rootIds.length];
        this.reuse = reuse;
    }

    private static ByteBuffer read(Path file) throws IOException {
        return ByteBuffer.wrap(Files.readAllBytes(file)).order(ByteOrder.LITTLE_ENDIAN);
    }

    public static void main(String[] arguments) throws IOException {
        Path folder = Path.of(arguments[0]);
        int aged = Integer.parseInt(arguments[1]);
        AckerBench bench = new AckerBench(folder, arguments[2].equals("reused"));
        int rows = Math.min(bench.rootIds.length, WARM_UP);
        for (int done = 0; done < WARM_UP; done += rows) {
            bench.open();
            bench.run(0, rows);
        }
        bench.open();
        bench.run(0, aged);
        System.out.println("ready");
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            String[] rowsAsked = line.split(" ");
            long nanos = bench.run(Integer.parseInt(rowsAsked[0]), Integer.parseInt(rowsAsked[1]));
            ByteBuffer out = ByteBuffer.allocate(bench.ackedCount * Long.BYTES);
            out.order(ByteOrder.LITTLE_ENDIAN).asLongBuffer().put(bench.acked, 0, bench.ackedCount);
            Files.write(folder.resolve("acked"), out.array());
            System.out.println(nanos);
        }
    }

    private void open() {
        acker = new Acker();
        acker.prepare(Map.of(), null, new OutputCollector(new Collector()));
    }

    private long run(int from, int to) {
        ReusedMessage reused = new ReusedMessage();
        ackedCount = 0;
        long start = THREADS.getCurrentThreadCpuTime();
        for (int row = from; row < to; row++) {
            boolean init = tasks[row] >= 0;
            String stream = init ? Acker.ACKER_INIT_STREAM_ID : Acker.ACKER_ACK_STREAM_ID;
            if (reuse) {
                reused.row = row;
                reused.stream = stream;
                acker.execute(reused);
            } else if (init) {
                acker.execute(new FreshMessage(stream, new Values(rootIds[row], vals[row], tasks[row])));
            } else {
                acker.execute(new FreshMessage(stream, new Values(rootIds[row], vals[row])));
            }
        }
        return THREADS.getCurrentThreadCpuTime() - start;
    }

    /** Takes what the acker emits. */
    private final class Collector implements IOutputCollector {
        @Override public void emitDirect(
                int task, String stream, Collection<Tuple> anchors, List<Object> values) {
            if (!Acker.ACKER_ACK_STREAM_ID.equals(stream)) {
                throw new IllegalStateException("this stream of messages has no fails");
            }
            acked[ackedCount++] = (Long) values.get(0);
        }

        @Override public List<Integer> emit(
                String stream, Collection<Tuple> anchors, List<Object> values) {
            throw new IllegalStateException("an acker emits to one task");
        }

        @Override public void ack(Tuple input) { }

        @Override public void fail(Tuple input) { }

        @Override public void resetTimeout(Tuple input) { }

        @Override public void flush() { }

        @Override public void reportError(Throwable error) {
            throw new IllegalStateException(error);
        }
    }

    /** A tuple of its own for a row: (id, val, task) or (id, val). */
    private static final class FreshMessage extends Message {
        private final Values values;

        private FreshMessage(String stream, Values values) {
            this.stream = stream;
            this.values = values;
        }

        @Override public Object getValue(int field) { return values.get(field); }

        @Override public int size() { return values.size(); }
    }

    /** The tuple of whichever row is set. */
    private final class ReusedMessage extends Message {
        private int row;

        @Override public Object getValue(int field) {
            switch (field) {
                case 0: return rootIds[row];
                case 1: return vals[row];
                default: return tasks[row];
            }
        }

        @Override public int size() { return tasks[row] >= 0 ? 3 : 2; }
    }

    private abstract static class Message implements Tuple {
        protected String stream;

        @Override public Long getLong(int field) { return (Long) getValue(field); }

        @Override public Integer getInteger(int field) { return (Integer) getValue(field); }

        @Override public String getSourceStreamId() { return stream; }

        @Override public String getSourceComponent() { return "spout"; }

        @Override public int getSourceTask() { return 1; }

        // The acker asks for nothing below.
        private UnsupportedOperationException unasked() { return new UnsupportedOperationException(); }

        @Override public GlobalStreamId getSourceGlobalStreamId() { throw unasked(); }

        @Override public MessageId getMessageId() { throw unasked(); }

        @Override public GeneralTopologyContext getContext() { throw unasked(); }

        @Override public boolean contains(String field) { throw unasked(); }

        @Override public Fields getFields() { throw unasked(); }

        @Override public int fieldIndex(String field) { throw unasked(); }

        @Override public List<Object> select(Fields selector) { throw unasked(); }

        @Override public String getString(int i) { throw unasked(); }

        @Override public Boolean getBoolean(int i) { throw unasked(); }

        @Override public Short getShort(int i) { throw unasked(); }

        @Override public Byte getByte(int i) { throw unasked(); }

        @Override public Double getDouble(int i) { throw unasked(); }

        @Override public Float getFloat(int i) { throw unasked(); }

        @Override public byte[] getBinary(int i) { throw unasked(); }

        @Override public Object getValueByField(String field) { throw unasked(); }

        @Override public String getStringByField(String field) { throw unasked(); }

        @Override public Integer getIntegerByField(String field) { throw unasked(); }

        @Override public Long getLongByField(String field) { throw unasked(); }

        @Override public Boolean getBooleanByField(String field) { throw unasked(); }

        @Override public Short getShortByField(String field) { throw unasked(); }

        @Override public Byte getByteByField(String field) { throw unasked(); }

        @Override public Double getDoubleByField(String field) { throw unasked(); }

        @Override public Float getFloatByField(String field) { throw unasked(); }

        @Override public byte[] getBinaryByField(String field) { throw unasked(); }

        @Override public List<Object> getValues() { throw unasked(); }
    }
}
