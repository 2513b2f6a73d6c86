// A client in another language: Node.js without packages, from docs/protocol.md, without shared memory.
//
// Start an agent with `allreduced agent --socket /tmp/a.sock`, and two of these (or one, and one in another language):
//
//     node examples/node_client.mjs /tmp/a.sock job-1 0 2 &
//     node examples/node_client.mjs /tmp/a.sock job-1 1 2
//
// (A path, since Node.js 20 cannot connect to a name such as @a.)

import { once } from "node:events";
import net from "node:net";
import { setTimeout as sleep } from "node:timers/promises";

const HELLO = 1, JOIN = 2, SUBMIT = 5, UPLOAD = 6, LEAVE = 8;
const WELCOME = 65, REFUSED = 66, JOINED = 67, DONE = 71, DOWNLOAD = 72, REQUEST_FAILED = 73;
const FLOAT32 = 1, SUM = 1, PIECE = 1 << 20;

// msgpack: the few forms that are needed to write, and all that an agent may send. 64 bits are a BigInt, as the handles of
// groups may need all of them. A whole number is taken for a float too.

function pack(value) {
  const head = (size, code, write) => { const b = Buffer.alloc(size); b[0] = code; write?.(b); return b; };
  if (value === null) return head(1, 0xc0);
  if (typeof value === "boolean") return head(1, value ? 0xc3 : 0xc2);
  if (typeof value === "number" || typeof value === "bigint")
    return value < 0 ? head(9, 0xd3, (b) => b.writeBigInt64BE(BigInt(value), 1))
                     : head(9, 0xcf, (b) => b.writeBigUInt64BE(BigInt(value), 1));
  if (typeof value === "string") {
    const data = Buffer.from(value, "utf8");
    return Buffer.concat([head(3, 0xda, (b) => b.writeUInt16BE(data.length, 1)), data]);
  }
  if (Buffer.isBuffer(value)) return Buffer.concat([head(5, 0xc6, (b) => b.writeUInt32BE(value.length, 1)), value]);
  return Buffer.concat([head(3, 0xdc, (b) => b.writeUInt16BE(value.length, 1)), ...value.map(pack)]);
}

function message(code, ...fields) {
  const [head, ...rest] = [Buffer.alloc(3), Buffer.from([code]), ...fields.map(pack)]; // the code itself is one byte
  head[0] = 0xdc;
  head.writeUInt16BE(fields.length + 1, 1);
  const body = Buffer.concat([head, ...rest]), length = Buffer.alloc(4);
  length.writeUInt32LE(body.length);
  return Buffer.concat([length, body]);
}

function unpack(data) {
  let at = 0;
  const take = (size) => data.subarray(at, (at += size));
  const size = (bytes) => take(bytes).readUIntBE(0, bytes);
  const array = (n) => Array.from({ length: n }, value);
  const map = (n) => Object.fromEntries(Array.from({ length: n }, () => [value(), value()]));
  const forms = {
    0xc0: () => null, 0xc2: () => false, 0xc3: () => true,
    0xca: () => take(4).readFloatBE(), 0xcb: () => take(8).readDoubleBE(),
    0xcc: () => size(1), 0xcd: () => size(2), 0xce: () => size(4), 0xcf: () => take(8).readBigUInt64BE(),
    0xd0: () => take(1).readInt8(), 0xd1: () => take(2).readInt16BE(), 0xd2: () => take(4).readInt32BE(),
    0xd3: () => take(8).readBigInt64BE(),
    0xc4: () => take(size(1)), 0xc5: () => take(size(2)), 0xc6: () => take(size(4)),
    0xd9: () => take(size(1)).toString(), 0xda: () => take(size(2)).toString(), 0xdb: () => take(size(4)).toString(),
    0xdc: () => array(size(2)), 0xdd: () => array(size(4)), 0xde: () => map(size(2)), 0xdf: () => map(size(4)),
  };
  function value() {
    const code = size(1);
    if (code < 0x80) return code;
    if (code < 0x90) return map(code & 15);
    if (code < 0xa0) return array(code & 15);
    if (code < 0xc0) return take(code & 31).toString();
    return code >= 0xe0 ? code - 256 : forms[code]();
  }
  return value();
}

// A connection. Where the agent's queue is full, the system says EAGAIN: it is tried again, for 30 s.
async function open(path) {
  for (const until = Date.now() + 30_000; ; await sleep(20)) {
    const socket = net.connect(path);
    try {
      await once(socket, "connect");
      return socket;
    } catch (error) {
      if (error.code !== "EAGAIN" || Date.now() >= until) throw error;
    }
  }
}

class Client {
  #request = 0;

  static async connect(path, job, rank, size) {
    const client = new Client();
    client.socket = await open(path);
    client.input = client.socket.iterator({ destroyOnReturn: false });
    client.rest = Buffer.alloc(0);
    client.socket.write(message(HELLO, 1, 1, process.pid, false));
    [, , client.node, , client.inlineLimit] = await client.receive(WELCOME);
    client.socket.write(message(JOIN, 0, job, "world", rank, size, 0, 60, 0));
    [, , client.group] = await client.receive(JOINED);
    return client;
  }

  // The sum of the Float32Arrays of all ranks.
  async allReduce(values, name) {
    const data = Buffer.from(values.buffer, values.byteOffset, values.byteLength);
    const inside = data.length <= this.inlineLimit, request = ++this.#request;
    this.socket.write(message(SUBMIT, request, this.group, "all_reduce", name, FLOAT32, SUM, `(${values.length},)`,
      values.length, -1, 0, 0, "", inside && data.length ? data : null, -1, 0, !inside, true));
    for (let at = 0; !inside && at < data.length; at += PIECE)
      this.socket.write(message(UPLOAD, request, data.subarray(at, at + PIECE)));
    const [, , payload, , , , , inPieces] = await this.receive(DONE);
    const pieces = [payload ?? Buffer.alloc(0)];
    for (let last = !inPieces; !last; ) {
      const [, , piece, isLast] = await this.receive(DOWNLOAD);
      pieces.push(piece);
      last = isLast;
    }
    const whole = Buffer.concat(pieces);
    return new Float32Array(whole.buffer.slice(whole.byteOffset, whole.byteOffset + whole.length));
  }

  close() {
    this.socket.end(message(LEAVE, this.group));
  }

  async receive(code) {
    const got = unpack(await this.#read((await this.#read(4)).readUInt32LE()));
    if (got[0] === REFUSED || got[0] === REQUEST_FAILED) throw new Error(got[got[0] === REFUSED ? 1 : 2][1]);
    if (got[0] !== code) throw new Error(`message ${got[0]} instead of ${code}`);
    return got;
  }

  async #read(size) {
    const parts = [this.rest];
    let length = this.rest.length;
    while (length < size) {
      const { value, done } = await this.input.next();
      if (done) throw new Error("the agent closed the connection");
      parts.push(value);
      length += value.length;
    }
    const all = Buffer.concat(parts);
    this.rest = all.subarray(size);
    return all.subarray(0, size);
  }
}

const [path, job, rank, size] = process.argv.slice(2).map((text, at) => (at < 2 ? text : Number(text)));
const client = await Client.connect(path, job, rank, size);
for (const count of [3, 1_000_000]) {
  const total = await client.allReduce(new Float32Array(count).fill(rank + 1), `sum of ${count}`);
  console.log(`rank ${rank} of ${size} on ${client.node}: ${total.length} x ${total[0].toFixed(1)}`);
  if (total.length !== count || !total.every((value) => value === (size * (size + 1)) / 2)) throw new Error("wrong");
}
client.close();
