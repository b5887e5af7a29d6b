#include <fmt/format.h>

#include <deque>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/weights.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

namespace sluice {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// Which pipeline ranks write a file, and which parameters go where.
struct Parts {
  std::vector<int> part_of_rank;  // -1: owns nothing
  int count = 0;
};

struct OwnedParameter {
  std::string name;
  int rank = 0;
  std::int64_t elements = 0;
};

std::vector<OwnedParameter> owned_parameters(const JobLayout& layout) {
  std::vector<OwnedParameter> owned;
  for (int stage = 0; stage < layout.plans.num_stages(); ++stage) {
    const auto& parameters = layout.parameters.stages[static_cast<std::size_t>(stage)].parameters;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!layout.parameters.is_owner(stage, static_cast<int>(i))) continue;
      owned.push_back(
          {parameters[i].name, layout.plans.placement().rank_of(stage), parameters[i].elements});
    }
  }
  return owned;
}

Parts parts_of(const JobLayout& layout) {
  Parts parts;
  parts.part_of_rank.assign(static_cast<std::size_t>(layout.place.topology.pipeline), -1);
  for (const OwnedParameter& owned : owned_parameters(layout)) {
    parts.part_of_rank[static_cast<std::size_t>(owned.rank)] = 0;
  }
  for (int& part : parts.part_of_rank) part = part < 0 ? part : parts.count++;
  return parts;
}

// Kinds of state the optimizer keeps per parameter, e.g. exp_avg and exp_avg_sq.
std::set<std::string> state_kinds(const std::vector<OptimizerState>& states) {
  std::set<std::string> kinds;
  for (const OptimizerState& state : states) kinds.insert(state.kind);
  return kinds;
}

void require_done(const std::error_code& error, const char* what, const fs::path& path) {
  if (!error) return;
  throw_error(ErrorCode::kIo, "cannot {} '{}': {}", what, path.string(), error.message());
}

void remove_file(const fs::path& path) {
  std::error_code error;
  fs::remove(path, error);
  require_done(error, "remove", path);
}

void remove_stale(const fs::path& directory, const std::string& kind,
                  const std::map<std::string, std::string>& file_of) {
  std::set<std::string> current;
  for (const auto& [name, file] : file_of) current.insert(file);
  if (current.size() > 1) current.insert(kind + ".safetensors.index.json");
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string file = entry->path().filename().string();
    const bool written_here = file == kind + ".safetensors" ||
                              file == kind + ".safetensors.index.json" ||
                              (file.starts_with(kind + "-") && file.ends_with(".safetensors"));
    if (written_here && !current.contains(file)) remove_file(entry->path());
  }
  require_done(error, "list directory", directory);
}

void write_text_file(const fs::path& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

// The files that rank 0 writes: indices over the files of all ranks, then configuration and state.
void write_directory(const Pipeline& pipeline, const std::set<std::string>& kinds,
                     const fs::path& directory, const std::string& config) {
  const JobLayout& layout = PipelineAccess::layout(pipeline);
  const Parts parts = parts_of(layout);
  std::map<std::string, std::string> model, optimizer;
  std::size_t bytes = 0;
  for (const OwnedParameter& parameter : owned_parameters(layout)) {
    const int part = parts.part_of_rank[static_cast<std::size_t>(parameter.rank)];
    model[parameter.name] = weights_file_name("model", part, parts.count);
    for (const std::string& kind : kinds) {
      optimizer[kind + "." + parameter.name] = weights_file_name("optimizer", part, parts.count);
    }
    bytes += static_cast<std::size_t>(parameter.elements) * 4;
  }
  if (parts.count > 1) {
    write_weights_index(directory, "model", model, bytes);
    if (!kinds.empty()) {
      write_weights_index(directory, "optimizer", optimizer, bytes * kinds.size());
    }
  }
  remove_stale(directory, "model", model);
  remove_stale(directory, "optimizer", optimizer);
  write_text_file(directory / "config.json", config);
  write_text_file(directory / "state.json",
                  Json{{"format", 1}, {"step", pipeline.step()}}.dump(2) + "\n");
}

// Tensors in host memory, for writing to a file.
class HostTensors {
 public:
  explicit HostTensors(Device device) : device_(device) {}
  void add(std::string name, const Tensor& tensor) {
    Tensor host = tensor;
    if (device_.kind != DeviceKind::kCpu) {
      std::vector<std::byte>& copy = copies_.emplace_back(tensor.spec.bytes());
      copy_now(device_, copy.data(), tensor.data, copy.size());
      host.data = copy.data();
    }
    tensors_.push_back({std::move(name), host});
  }
  [[nodiscard]] const std::vector<NamedTensor>& all() const { return tensors_; }

 private:
  Device device_;
  std::deque<std::vector<std::byte>> copies_;
  std::vector<NamedTensor> tensors_;
};

void read(const WeightsDirectory& weights, const std::string& name, const Tensor& into,
          HostMirror& mirror) {
  weights.read(name, {mirror.writable_host_copy(into).data(), into.spec});
  mirror.write_back();
}

// Every saved parameter must be one of the model's.
void require_known(const WeightsDirectory& weights, const JobLayout& layout,
                   const fs::path& directory) {
  std::set<std::string> known;
  for (const OwnedParameter& parameter : owned_parameters(layout)) known.insert(parameter.name);
  for (const std::string& name : weights.names()) {
    if (known.contains(name)) continue;
    throw_error(ErrorCode::kWeights,
                "weights in '{}' do not fit the model: it has no parameter '{}' (is it "
                "another --model, --layers or --untie?)",
                directory.string(), name);
  }
}

std::uint64_t saved_step(const fs::path& directory) {
  const fs::path path = directory / "state.json";
  std::ifstream in(path);
  const Json state = Json::parse(in, nullptr, false);
  const auto step = state.find("step");
  if (step != state.end() && step->is_number_unsigned()) return step->get<std::uint64_t>();
  throw_error(ErrorCode::kWeights,
              "'{}' is missing or damaged; --resume needs a directory that --save wrote",
              path.string());
}

}  // namespace

void save_checkpoint(Pipeline& pipeline, const fs::path& directory, const std::string& config) {
  PipelineAccess::guarded(pipeline, "saving", [&] {
    const JobLayout& layout = PipelineAccess::layout(pipeline);
    const std::vector<OptimizerState> states = pipeline.optimizer_state();
    // Kinds are the optimizer's, the same on every rank that owns a parameter.
    std::set<std::string> kinds;
    for (const std::string& text :
         PipelineAccess::world(pipeline).all_gather_strings(Json(state_kinds(states)).dump())) {
      kinds.merge(Json::parse(text).get<std::set<std::string>>());
    }
    if (PipelineAccess::world(pipeline).communicator().rank() == 0) {
      require_writable_directory(directory);
      std::error_code error;
      fs::create_directories(directory, error);
      require_done(error, "create directory", directory);
      // --resume needs this file, so a save that is cut short cannot be resumed.
      remove_file(directory / "state.json");
    }
    PipelineAccess::world(pipeline).barrier();
    const Parts parts = parts_of(layout);
    const int part = parts.part_of_rank[static_cast<std::size_t>(layout.place.rank)];
    if (layout.place.replica == 0 && part >= 0) {
      const std::map<std::string, std::string> metadata = {
          {"format", "pt"}, {"step", std::to_string(pipeline.step())}};
      pipeline.compute().stream().synchronize();
      HostTensors model(pipeline.compute().device()), optimizer(pipeline.compute().device());
      for (const Pipeline::Owned& owned : pipeline.parameters()) {
        if (owned.owner) model.add(owned.parameter->name, owned.parameter->value);
      }
      for (const OptimizerState& state : states) {
        optimizer.add(state.kind + "." + state.parameter, state.tensor);
      }
      write_safetensors(directory / weights_file_name("model", part, parts.count), model.all(),
                        metadata);
      if (!optimizer.all().empty()) {
        write_safetensors(directory / weights_file_name("optimizer", part, parts.count),
                          optimizer.all(), metadata);
      }
    }
    PipelineAccess::world(pipeline).barrier();
    if (PipelineAccess::world(pipeline).communicator().rank() == 0) {
      write_directory(pipeline, kinds, directory, config);
    }
    PipelineAccess::world(pipeline).barrier();
  });
}

std::uint64_t require_fitting_checkpoint(const JobLayout& layout, const fs::path& directory) {
  const WeightsDirectory weights(directory, "model");
  require_known(weights, layout, directory);
  for (const OwnedParameter& parameter : owned_parameters(layout)) {
    const SafetensorsFile::Entry* entry = weights.find(parameter.name);
    if (entry != nullptr && entry->spec.shape.elements() == parameter.elements) continue;
    const std::string there =
        entry == nullptr ? "is missing" : fmt::format("was saved as {}", to_string(entry->spec));
    throw_error(ErrorCode::kWeights,
                "weights in '{}' do not fit the model: tensor '{}' {}, but the model needs "
                "{} elements",
                directory.string(), parameter.name, there, parameter.elements);
  }
  return saved_step(directory);
}

void load_weights(Pipeline& pipeline, const fs::path& directory) {
  PipelineAccess::guarded(pipeline, "loading the weights", [&] {
    const WeightsDirectory weights(directory, "model");
    HostMirror mirror(pipeline.compute(), nullptr);
    require_known(weights, PipelineAccess::layout(pipeline), directory);
    for (const Pipeline::Owned& owned : pipeline.parameters()) {
      if (owned.owner) read(weights, owned.parameter->name, owned.parameter->value, mirror);
    }
    pipeline.compute().stream().synchronize();  // before the mirror goes
    PipelineAccess::world(pipeline).barrier();
  });
  pipeline.values_changed();
}

void load_checkpoint(Pipeline& pipeline, const fs::path& directory) {
  load_weights(pipeline, directory);
  PipelineAccess::guarded(pipeline, "loading the optimizer's state", [&] {
    const std::vector<OptimizerState> states = pipeline.optimizer_state();
    if (!states.empty()) {
      const WeightsDirectory optimizer(directory, "optimizer");
      HostMirror mirror(pipeline.compute(), nullptr);
      for (const OptimizerState& state : states) {
        read(optimizer, state.kind + "." + state.parameter, state.tensor, mirror);
      }
      pipeline.compute().stream().synchronize();  // before the mirror goes
    }
    pipeline.set_step(saved_step(directory));
    PipelineAccess::world(pipeline).barrier();
  });
}

}  // namespace sluice
