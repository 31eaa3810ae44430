// The Python module _cpu: an Engine that runs or records Commands over numpy arrays.
//
// Checks what would make a pointer wrong (dtype, contiguity, by the argument types); shapes are
// checked in kernels/cpu/ops.py. Knows nothing of models.
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "commands.h"
#include "matmul.h"
#include "python_objects.h"

using namespace nanobind::literals;

namespace voltapile {
namespace {

// --- the records of kernels/ops.py, by attribute -------------------------------------------------

template <class T>
Array<T> field(nb::handle record, const char* name) {
  try {
    return nb::cast<Array<T>>(record.attr(name), false);  // false: never a converted copy
  } catch (const nb::cast_error&) {
    throw nb::type_error((std::string(name) + " has the wrong dtype or layout").c_str());
  }
}

struct BatchArrays {
  explicit BatchArrays(nb::handle b)
      : tokens(field<std::int32_t>(b, "tokens")),
        positions(field<std::int32_t>(b, "positions")),
        rope_positions(field<std::int32_t>(b, "rope_positions")),
        slots(field<const std::int32_t>(b, "slots")),
        continues(field<const std::int32_t>(b, "continues")),
        outputs(field<const std::int32_t>(b, "outputs")) {}
  BatchView view() const {
    return {tokens.data(), positions.data(), rope_positions.data(), slots.data(),
            continues.data(), outputs.data(), static_cast<std::int64_t>(tokens.size()),
            static_cast<std::int64_t>(outputs.size())};
  }
  IntsOut tokens, positions, rope_positions;
  Ints slots, continues, outputs;
};

struct SlotArrays {
  explicit SlotArrays(nb::handle s)
      : last_token(field<std::int32_t>(s, "last_token")),
        next_position(field<std::int32_t>(s, "next_position")),
        finished(field<std::int32_t>(s, "finished")),
        history(field<std::int32_t>(s, "history")),
        max_position(field<const std::int32_t>(s, "max_position")),
        stop_ids(field<const std::int32_t>(s, "stop_ids")),
        top_k(field<const std::int32_t>(s, "top_k")),
        prompt_tokens(field<const std::int32_t>(s, "prompt_tokens")),
        penalty_window(field<const std::int32_t>(s, "penalty_window")),
        bias_count(field<const std::int32_t>(s, "bias_count")),
        bias_ids(field<const std::int32_t>(s, "bias_ids")),
        logprobs(field<const std::int32_t>(s, "logprobs")),
        masked(field<const std::int32_t>(s, "masked")),
        forced(field<const std::int32_t>(s, "forced")),
        temperature(field<const float>(s, "temperature")),
        top_p(field<const float>(s, "top_p")),
        min_p(field<const float>(s, "min_p")),
        repetition_penalty(field<const float>(s, "repetition_penalty")),
        presence_penalty(field<const float>(s, "presence_penalty")),
        frequency_penalty(field<const float>(s, "frequency_penalty")),
        bias_values(field<const float>(s, "bias_values")),
        seed(field<const std::uint64_t>(s, "seed")),
        mask(field<const std::uint32_t>(s, "mask")) {}
  SlotView view() const {
    const auto width = [](const auto& x) { return static_cast<std::int64_t>(x.shape(1)); };
    return {last_token.data(), next_position.data(), finished.data(), history.data(),
            max_position.data(), stop_ids.data(), top_k.data(), prompt_tokens.data(),
            penalty_window.data(), bias_count.data(), bias_ids.data(), logprobs.data(),
            masked.data(), forced.data(), temperature.data(), top_p.data(), min_p.data(),
            repetition_penalty.data(),
            presence_penalty.data(), frequency_penalty.data(), bias_values.data(), seed.data(),
            mask.data(), width(stop_ids), width(bias_ids), width(history), width(mask)};
  }
  IntsOut last_token, next_position, finished, history;
  Ints max_position, stop_ids, top_k, prompt_tokens, penalty_window, bias_count, bias_ids, logprobs,
      masked, forced;
  Floats temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
      bias_values;
  Array<const std::uint64_t> seed;
  Array<const std::uint32_t> mask;
};

struct OutputArrays {
  explicit OutputArrays(nb::handle o)
      : tokens(field<std::int32_t>(o, "tokens")),
        finish(field<std::int32_t>(o, "finish")),
        logprob_ids(field<std::int32_t>(o, "logprob_ids")),
        logprobs(field<float>(o, "logprobs")) {}
  OutputView view() const {
    return {tokens.data(), finish.data(), logprob_ids.data(), logprobs.data(),
            static_cast<std::int64_t>(logprobs.shape(1))};
  }
  IntsOut tokens, finish, logprob_ids;
  FloatsOut logprobs;
};

// --- ops: each makes a Command and submits it ----------------------------------------------------

void begin(Engine& engine, nb::handle batch, nb::handle state) {
  const BatchArrays b(batch);
  const SlotArrays s(state);
  engine.submit(make_begin(b.view(), s.view()), b, s);
}

void sample(Engine& engine, Floats logits, nb::handle batch, nb::handle state, nb::handle out,
            FloatsOut adjusted) {
  const BatchArrays b(batch);
  const SlotArrays s(state);
  const OutputArrays o(out);
  const std::int64_t vocab = static_cast<std::int64_t>(logits.shape(1));
  engine.submit(
      make_sample(logits.data(), vocab, b.view(), s.view(), o.view(), adjusted.data()), logits, b,
      s, o, adjusted);
}

void rms_norm(Engine& engine, Floats x, Floats weight, FloatsOut out, float eps, bool accumulate) {
  const std::int64_t cols = length(weight), rows = length(x) / cols;
  engine.submit(
      make_rms_norm({x.data(), weight.data(), out.data(), rows, cols, eps, accumulate}), x, weight,
      out);
}

void softcap(Engine& engine, FloatsOut x, float cap) {
  engine.submit(make_softcap(x.data(), static_cast<std::int64_t>(x.size()), cap), x);
}

void rope_angles(Engine& engine, Ints positions, Floats inv_freq, FloatsOut out, float scale) {
  std::vector<float> frequencies(inv_freq.data(), inv_freq.data() + inv_freq.size());
  engine.submit(make_rope_angles(positions.data(), static_cast<std::int64_t>(positions.size()),
                                 std::move(frequencies), scale, out.data()),
                positions, out);
}

void rope(Engine& engine, FloatsOut x, Floats angles, std::int64_t head_dim, bool neox) {
  const std::int64_t tokens = static_cast<std::int64_t>(angles.shape(0));
  const std::int64_t heads = tokens ? static_cast<std::int64_t>(x.size()) / tokens / head_dim : 0;
  const std::int64_t pairs = static_cast<std::int64_t>(angles.shape(1));
  engine.submit(make_rope({x.data(), angles.data(), tokens, heads, head_dim, pairs, neox}), x,
                angles);
}

void store_kv(Engine& engine, nb::object cache, Floats k, Floats v, Ints slots, Ints positions,
              Ints table) {
  const KvLayout& layout = nb::cast<CacheObject&>(cache).layout;
  engine.submit(make_store_kv({k.data(), v.data(), layout, places(slots, positions, table)}),
                cache, k, v, slots, positions, table);
}

void attention(Engine& engine, Floats q, FloatsOut out, nb::object cache, Ints slots,
               Ints positions, Ints table, const std::vector<std::int32_t>& head_map, float scale,
               std::int64_t window, float softcap, std::optional<FloatsOut> weights) {
  AttentionArgs args{};
  args.q = q.data();
  args.out = out.data();
  args.weights = weights ? weights->data() : nullptr;
  args.cache = nb::cast<CacheObject&>(cache).layout;
  args.at = places(slots, positions, table);
  args.heads = static_cast<std::int64_t>(head_map.size());
  args.scale = scale;
  args.softcap = softcap;
  args.window = window;
  engine.submit(make_attention(args, head_map, Pool::kLocalBytes), q, out, cache, slots, positions,
                table, weights);
}

// out row i = row index[i] of x; without an index all rows.
void gather(Engine& engine, Floats x, std::optional<Ints> index, FloatsOut out,
            std::int64_t cols) {
  const std::int64_t rows = length(x) / cols;
  const std::int64_t count = index ? static_cast<std::int64_t>(index->size()) : rows;
  const std::int32_t* picked = index ? index->data() : nullptr;
  engine.submit(make_gather(x.data(), rows, picked, count, cols, out.data()), x, index, out);
}

void embed(Engine& engine, nb::object table, Ints tokens, FloatsOut out, float scale) {
  const std::int64_t count = static_cast<std::int64_t>(tokens.size());
  engine.submit(make_embed(matrix_of(table), tokens.data(), count, scale, out.data()), table,
                tokens, out);
}

// outs[i] (+)= x . matrices[i]^T + biases[i]; the lists have one length.
void linears(Engine& engine, Floats x, std::int64_t tokens, const std::vector<nb::object>& matrices,
             const std::vector<std::optional<Floats>>& biases, const std::vector<FloatsOut>& outs,
             bool accumulate, BytesOut quantised) {
  std::vector<Product> products;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const Matrix* weight = matrix_of(matrices[i]);
    products.push_back(
        {weight, data_or_null(biases[i]), outs[i].data(), weight->rows, accumulate});
  }
  engine.submit(make_linear(x.data(), tokens, std::move(products), quantised.data()), x, matrices,
                biases, outs, quantised);
}

void glu(Engine& engine, Floats x, std::int64_t tokens, nb::object gate, nb::object up,
         std::optional<Floats> gate_bias, std::optional<Floats> up_bias, bool gelu, FloatsOut out,
         BytesOut quantised) {
  const Activation activation = gelu ? Activation::gelu_tanh : Activation::silu;
  engine.submit(make_glu(x.data(), tokens, matrix_of(gate), matrix_of(up),
                         data_or_null(gate_bias), data_or_null(up_bias), activation, out.data(),
                         quantised.data()),
                x, gate, up, gate_bias, up_bias, out, quantised);
}

void unpack_to(int type, Array<const std::uint8_t> data, FloatsOut out) {
  unpack(type, data.data(), static_cast<std::int64_t>(data.size()),
         static_cast<std::int64_t>(out.size()), out.data());
}

void choose_isa(const std::string& name) {
  if (!set_isa(name.c_str())) throw std::invalid_argument("this CPU has no " + name);
}

}  // namespace
}  // namespace voltapile

NB_MODULE(_cpu, m) {
  using namespace voltapile;
  // Arrays are never converted: a copy would cut the tie to the caller's memory.
  const auto same = [](const char* name) { return nb::arg(name).noconvert(); };
  const auto maybe = [](const char* name) { return nb::arg(name).noconvert().none(); };

  nb::class_<MatrixObject>(m, "Matrix")
      .def(nb::init<Array<const std::uint8_t>, int, std::int64_t, std::int64_t,
                    std::optional<Floats>>(),
           same("data"), "type"_a, "rows"_a, "cols"_a, maybe("factors") = nb::none());
  nb::class_<CacheObject>(m, "KvCache")
      .def(nb::init<BytesOut, BytesOut, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                    std::int64_t, const std::string&, const std::string&>(),
           same("keys"), same("values"), "pages"_a, "kv_heads"_a, "page_tokens"_a, "key_dim"_a,
           "value_dim"_a, "key_type"_a, "value_type"_a);
  nb::class_<Recording>(m, "Recording")
      .def("__len__", [](const Recording& r) { return r.commands.size(); });
  nb::class_<Engine> engine(m, "Engine");
  engine
      .def(nb::init<int, const std::vector<int>&, std::uintptr_t, std::uintptr_t>(), "threads"_a,
           "cpus"_a, "heartbeat"_a, "abort"_a)
      .def_prop_ro("threads", &Engine::threads)
      .def("record", &Engine::record)
      .def("recorded", &Engine::recorded, nb::rv_policy::take_ownership)
      .def("replay", &Engine::replay, "recording"_a)
      .def("begin", begin, "batch"_a, "state"_a)
      .def("sample", sample, same("logits"), "batch"_a, "state"_a, "out"_a,
           same("adjusted"))
      .def("rms_norm", rms_norm, same("x"), same("weight"), same("out"), "eps"_a,
           "accumulate"_a)
      .def("softcap", softcap, same("x"), "cap"_a)
      .def("rope_angles", rope_angles, same("positions"), same("inv_freq"), same("out"), "scale"_a)
      .def("rope", rope, same("x"), same("angles"), "head_dim"_a, "neox"_a)
      .def("store_kv", store_kv, "cache"_a, same("k"), same("v"), same("slots"),
           same("positions"), same("table"))
      .def("attention", attention, same("q"), same("out"), "cache"_a, same("slots"),
           same("positions"), same("table"), "head_map"_a, "scale"_a, "window"_a, "softcap"_a,
           maybe("weights"))
      .def("gather", gather, same("x"), maybe("index"), same("out"), "cols"_a)
      .def("embed", embed, "table"_a, same("tokens"), same("out"), "scale"_a)
      .def("linears", linears, same("x"), "tokens"_a, "matrices"_a, same("biases"), same("outs"),
           "accumulate"_a, same("quantised"))
      .def("glu", glu, same("x"), "tokens"_a, "gate"_a, "up"_a, maybe("gate_bias"),
           maybe("up_bias"), "gelu"_a, same("out"), same("quantised"));

  bind_group(m, engine);
  bind_families(m, engine);
  bind_file_rows(m);
  m.def("is_supported", is_supported, "type"_a);
  m.def("unpack_to", unpack_to, "type"_a, same("data"), same("out"));
  m.def("quantised_bytes", quantised_bytes, "tokens"_a, "cols"_a);
  m.def("kv_pitch", CacheObject::pitch, "page_tokens"_a);
  m.def("isa", isa);
  m.def("set_isa", choose_isa, "name"_a);
}
