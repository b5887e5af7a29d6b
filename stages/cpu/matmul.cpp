#include "stages/cpu/matmul.hpp"

#include <fmt/core.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <dnnl.hpp>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/cpu/cpu_report.hpp"
#include "stages/cpu/library_call.hpp"
#include "stages/cpu/parallel.hpp"
#include "stages/cpu/widened.hpp"
#include "stages/cpu_kernels/kernels.hpp"

namespace sluice {

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const MatmulSpec& spec, const std::string& what) {
  throw_error(ErrorCode::kDevice, "{} cannot compute {}: {}", matmul_library(), to_string(spec),
              what);
}

dnnl::memory::data_type library_type(DType dtype) {
  return dtype == DType::kBf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

dnnl::memory::desc describe(const MatmulSpec& spec, std::int64_t rows, std::int64_t columns,
                            const MatmulLayout& layout, DType dtype) {
  if (spec.batches == 1) {
    return {{rows, columns}, library_type(dtype), {layout.row, layout.column}};
  }
  return {{spec.batches, rows, columns},
          library_type(dtype),
          {layout.batch, layout.row, layout.column}};
}

// A primitive with its memory objects and argument list, made once; a run only sets pointers.
struct PreparedMatmul {
  dnnl::matmul primitive;
  dnnl::memory a, b, bias, c, scratch;
  std::vector<dnnl_exec_arg_t> arguments;
  std::size_t scratch_bytes = 0;
  bool widened = false;  // then none of the above, but this
  WidenedMatmul in_f32;
  std::vector<PreparedMatmul*> block_matmuls;
};

dnnl::matmul::primitive_desc make_descriptor(const dnnl::engine& engine, const MatmulSpec& spec) {
  const dnnl::memory::desc a = describe(spec, spec.m, spec.k, spec.a, spec.operands);
  const dnnl::memory::desc b = describe(spec, spec.k, spec.n, spec.b, spec.operands);
  const dnnl::memory::desc c = describe(spec, spec.m, spec.n, spec.c, spec.result);
  dnnl::memory::desc bias;
  if (spec.bias) bias = describe(spec, 1, spec.n, {spec.n, 1, spec.n}, DType::kF32);
  if (spec.bias && spec.batches != 1) fail(spec, "a bias needs a single matmul");
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (spec.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0F);
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  return spec.bias ? dnnl::matmul::primitive_desc(engine, a, b, bias, c, attributes)
                   : dnnl::matmul::primitive_desc(engine, a, b, c, attributes);
#else
  const dnnl::matmul::desc operation =
      spec.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  return {operation, attributes, engine};
#endif
}

void bind(PreparedMatmul& matmul, int argument, const dnnl::memory& memory) {
  matmul.arguments.push_back({argument, memory.get()});
}

PreparedMatmul prepare_matmul(const dnnl::engine& engine, const MatmulSpec& spec) {
  const dnnl::matmul::primitive_desc descriptor = make_descriptor(engine, spec);
  PreparedMatmul matmul;
  matmul.primitive = dnnl::matmul(descriptor);
  matmul.a = dnnl::memory(descriptor.src_desc(), engine, DNNL_MEMORY_NONE);
  matmul.b = dnnl::memory(descriptor.weights_desc(), engine, DNNL_MEMORY_NONE);
  matmul.c = dnnl::memory(descriptor.dst_desc(), engine, DNNL_MEMORY_NONE);
  matmul.scratch = dnnl::memory(descriptor.scratchpad_desc(), engine, DNNL_MEMORY_NONE);
  matmul.scratch_bytes = descriptor.scratchpad_desc().get_size();
  bind(matmul, DNNL_ARG_SRC, matmul.a);
  bind(matmul, DNNL_ARG_WEIGHTS, matmul.b);
  bind(matmul, DNNL_ARG_DST, matmul.c);
  bind(matmul, DNNL_ARG_SCRATCHPAD, matmul.scratch);
  if (spec.bias) {
    matmul.bias = dnnl::memory(descriptor.bias_desc(), engine, DNNL_MEMORY_NONE);
    bind(matmul, DNNL_ARG_BIAS, matmul.bias);
  }
  return matmul;
}

// Between a matrix of bf16 and its copy of the same orientation: kernel(bf16, floats, length) for
// each row, or column if columns are contiguous.
template <typename Kernel>
void for_each_run(std::int64_t batches, std::int64_t rows, std::int64_t columns,
                  const MatmulLayout& layout, const MatmulLayout& copy, const Kernel& kernel) {
  const bool by_rows = layout.column == 1;
  const std::int64_t runs = by_rows ? rows : columns, length = by_rows ? columns : rows;
  const std::int64_t stride = by_rows ? layout.row : layout.column;
  const std::int64_t copy_stride = by_rows ? copy.row : copy.column;
  const auto grain = std::max<std::int64_t>(1, kElementGrain / std::max<std::int64_t>(1, length));
  parallel_range(omp_get_max_threads(), batches * runs, grain,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i) {
                     const std::int64_t batch = i / runs, run = i % runs;
                     kernel(batch * layout.batch + run * stride,
                            batch * copy.batch + run * copy_stride, length);
                   }
                 });
}

// c where k is 0: the bias, or what accumulating leaves of it. The library leaves c as it is.
template <typename Result>
void write_sums_of_nothing(const MatmulSpec& spec, const float* bias, Result* c) {
  for (std::int64_t batch = 0; batch < spec.batches; ++batch) {
    for (std::int64_t i = 0; i < spec.m; ++i) {
      for (std::int64_t j = 0; j < spec.n; ++j) {
        Result& sum = c[batch * spec.c.batch + i * spec.c.row + j * spec.c.column];
        const float added = spec.bias ? bias[j] : 0.0F;
        if constexpr (std::is_same_v<Result, Bf16>) {
          sum = to_bf16(spec.accumulate ? to_float(sum) + added : added);
        } else {
          sum = spec.accumulate ? sum + added : added;
        }
      }
    }
  }
}

}  // namespace

struct MatmulCache::State {
  explicit State(Device where) : device(where) {}

  PreparedMatmul& find(const MatmulSpec& spec);
  void execute(const MatmulSpec& spec, PreparedMatmul& matmul, const void* a, const void* b,
               const void* bias, void* c);
  void prepare_widened(const MatmulSpec& spec, PreparedMatmul& matmul);
  void execute_widened(const MatmulSpec& spec, PreparedMatmul& matmul, const Bf16* a, const Bf16* b,
                       const float* bias, void* c);

  Device device;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::unordered_map<MatmulSpec, PreparedMatmul, MatmulSpecHash> matmuls;
  Buffer scratch;
  const TypedKernels& bf16 = choose_kernels().bf16;
  Buffer copies;  // of a widened block
  bool widen = !native_bf16();
  bool recording = false;
  std::vector<MatmulCall> record;
};

PreparedMatmul& MatmulCache::State::find(const MatmulSpec& spec) {
  const auto found = matmuls.find(spec);
  if (found != matmuls.end()) return found->second;
  PreparedMatmul matmul;
  matmul.widened = widen && spec.operands == DType::kBf16;
  if (!matmul.widened) {
    try {
      matmul = prepare_matmul(engine, spec);
    } catch (const dnnl::error& error) {
      if (spec.operands != DType::kBf16 || error.status != dnnl_unimplemented) {
        fail(spec, error.what());
      }
      matmul.widened = true;
    }
  }
  if (matmul.widened) prepare_widened(spec, matmul);
  if (matmul.scratch_bytes > scratch.size()) scratch = Buffer(device, matmul.scratch_bytes);
  return matmuls.emplace(spec, std::move(matmul)).first->second;
}

void MatmulCache::State::execute(const MatmulSpec& spec, PreparedMatmul& matmul, const void* a,
                                 const void* b, const void* bias, void* c) {
  if (matmul.widened) {
    return execute_widened(spec, matmul, static_cast<const Bf16*>(a), static_cast<const Bf16*>(b),
                           static_cast<const float*>(bias), c);
  }
  // The library reads sources through non-const handles.
  matmul.a.set_data_handle(const_cast<void*>(a));
  matmul.b.set_data_handle(const_cast<void*>(b));
  matmul.c.set_data_handle(c);
  matmul.scratch.set_data_handle(scratch.data());
  if (spec.bias) matmul.bias.set_data_handle(const_cast<void*>(bias));
  const dnnl_status_t status = execute_primitive(matmul.primitive, stream, matmul.arguments);
  if (status != dnnl_success) fail(spec, fmt::format("status {}", static_cast<int>(status)));
}

void MatmulCache::State::prepare_widened(const MatmulSpec& spec, PreparedMatmul& matmul) {
  matmul.in_f32 = sluice::widen(spec);
  for (const WidenedBlock& block : matmul.in_f32.blocks) {
    matmul.block_matmuls.push_back(&find(block.matmul));
  }
  const std::size_t bytes = matmul.in_f32.copies * sizeof(float);
  if (bytes > copies.size()) copies = Buffer(device, bytes);
}

void MatmulCache::State::execute_widened(const MatmulSpec& spec, PreparedMatmul& matmul,
                                         const Bf16* a, const Bf16* b, const float* bias, void* c) {
  const auto widen_operand = [this](const Bf16* from, float* to) {
    return [this, from, to](std::int64_t place, std::int64_t copy_place, std::int64_t length) {
      bf16.to_float(from + place, to + copy_place, length);
    };
  };
  const bool rounds = spec.result == DType::kBf16;
  auto* const wide_a = reinterpret_cast<float*>(copies.data());
  float* const wide_b = wide_a + matmul.in_f32.b_copy;
  std::int64_t copied_a = -1, copied_b = -1;  // where the blocks begin whose copies are there
  for (std::size_t i = 0; i < matmul.block_matmuls.size(); ++i) {
    const WidenedBlock& block = matmul.in_f32.blocks[i];
    const MatmulSpec& of = block.matmul;
    if (std::exchange(copied_a, block.a) != block.a) {
      for_each_run(of.batches, of.m, of.k, spec.a, of.a, widen_operand(a + block.a, wide_a));
    }
    if (std::exchange(copied_b, block.b) != block.b) {
      for_each_run(of.batches, of.k, of.n, spec.b, of.b, widen_operand(b + block.b, wide_b));
    }
    float* const sums = rounds ? wide_a + matmul.in_f32.c_copy : static_cast<float*>(c) + block.c;
    execute(of, *matmul.block_matmuls[i], wide_a, wide_b, of.bias ? bias + block.bias : nullptr,
            sums);
    if (!rounds || !block.whole) continue;
    Bf16* const result = static_cast<Bf16*>(c) + block.c;
    for_each_run(of.batches, of.m, of.n, spec.c, of.c,
                 [&](std::int64_t place, std::int64_t copy_place, std::int64_t length) {
                   bf16.from_float(sums + copy_place, result + place, length);
                 });
  }
}

MatmulCache::MatmulCache(Device device) : state_(std::make_unique<State>(device)) {}

MatmulCache::~MatmulCache() = default;

void MatmulCache::run(const MatmulSpec& spec, const void* a, const void* b, const void* bias,
                      void* c) {
  if (spec.batches == 0 || spec.m == 0 || spec.n == 0) return;
  if (spec.k == 0) {
    const auto* const row = static_cast<const float*>(bias);
    return spec.result == DType::kBf16 ? write_sums_of_nothing(spec, row, static_cast<Bf16*>(c))
                                       : write_sums_of_nothing(spec, row, static_cast<float*>(c));
  }
  PreparedMatmul& matmul = state_->find(spec);
  if (!state_->recording) {
    state_->execute(spec, matmul, a, b, bias, c);
    return;
  }
  const Clock::time_point start = Clock::now();
  state_->execute(spec, matmul, a, b, bias, c);
  const std::chrono::duration<double> took = Clock::now() - start;
  state_->record.push_back({spec, a, b, bias, c, took.count()});
}

void MatmulCache::prepare(const MatmulSpec& spec) { static_cast<void>(state_->find(spec)); }

std::size_t MatmulCache::size() const { return state_->matmuls.size(); }

void MatmulCache::widen_bf16(bool widen) {
  state_->widen = widen;
  std::erase_if(state_->matmuls,
                [](const auto& entry) { return entry.first.operands == DType::kBf16; });
}

void MatmulCache::record(bool on) {
  if (on) state_->record.clear();
  state_->recording = on;
}

std::span<const MatmulCall> MatmulCache::recorded() const { return state_->record; }

void MatmulCache::replay(std::span<const MatmulCall> calls) {
  for (const MatmulCall& call : calls) {
    state_->execute(call.spec, state_->find(call.spec), call.a, call.b, call.bias, call.c);
  }
}

}  // namespace sluice
