// One chat from Node with plain stubs: node chat.mjs [HOST:PORT] [QUESTION] [FOLDER OF THE PROTO FILES]
//
// Leaving the stream (call.cancel()) ends the request on the server. JAXINFER_API_KEY is sent where
// it is set.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address = "localhost:50051", question = "What is the capital of France?",
  folder = "../../proto"] = process.argv.slice(2);

const definition = loader.loadSync("jaxinfer/v1/inference.proto",
  { includeDirs: [folder], keepCase: true, longs: Number, defaults: true, oneofs: true });
const { Inference } = grpc.loadPackageDefinition(definition).jaxinfer.v1;
const client = new Inference(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
const key = process.env.JAXINFER_API_KEY;
if (key) metadata.set("authorization", `Bearer ${key}`);

const call = client.GenerateStream({
  chat: { messages: [{ role: "user", content: question }] },
  sampling: { temperature: 0, max_new_tokens: 100 },
}, metadata, { deadline: Date.now() + 60_000 });

call.on("data", chunk => {
  process.stdout.write(chunk.text);
  if (chunk.usage) {
    const { prompt_tokens, generated_tokens } = chunk.usage;
    console.log(`\n(${prompt_tokens} prompt tokens, ${generated_tokens} of output)`);
  }
});
call.on("error", error => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("end", () => client.close());
