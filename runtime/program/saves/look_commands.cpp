// `sluice digest`, `inspect` and `verify`: what a directory holds.
#include <fmt/core.h>

#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/hugging_face.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/verify.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/files/read_file.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/layout/division.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/saves/save_commands.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace {

constexpr const char* kAboutDigest =
    R"(Prints the SHA-256 of every parameter in DIR (the little-endian bytes of its fp32 values),
one line '<sha256>  <name>' each, sorted by name; then '<sha256>  total', the SHA-256 of those
lines. DIR is what 'sluice train --save DIR' wrote, of which it takes the newest step, one step,
or a directory of Hugging Face. Two runs ended with the same parameters, to the bit, where the
last lines agree. How the ranks that saved computed (virtual replicas, tensor shards, kernels,
matrix library, threads, blocks of rows) goes to standard error.)";

constexpr const char* kAboutInspect =
    R"(Prints what a model's directory holds: a line for every tensor of its files, then the model,
its parameters and bytes. DIR is a directory of Hugging Face, what 'sluice train --save DIR' wrote,
of which it takes the newest step, or one step. Reads no values and needs no MPI.)";

constexpr const char* kAboutVerify =
    R"(Compares the files of every save in DIR with the sizes and hashes that were recorded, and
prints a line for each, the newest first. DIR is what 'sluice train --save DIR' wrote, or one
step of it; of what 'sluice export' wrote the files are compared with SHA256SUMS. Ends with 0
where all are sound, else with 5. Changes nothing and needs no MPI.)";

// Bytes of tensors, and their types.
class ByteCount {
 public:
  void add(const TensorSpec& spec) {
    bytes_ += spec.bytes();
    types_.insert(name_of(spec.dtype));
  }
  [[nodiscard]] std::string text() const {
    return fmt::format("{} bytes{}{}", bytes_, types_.size() > 1 ? ", " : " of ",
                       joined(types_, ", "));
  }

 private:
  std::size_t bytes_ = 0;
  std::set<std::string> types_;
};

void print_tensors(const WeightsDirectory& weights) {
  std::size_t widest = 6;
  for (const std::string& name : weights.names()) widest = std::max(widest, name.size());
  fmt::print("{:<{}}  {:<5}  {:<16}  {:>12}  {}\n", "tensor", widest, "type", "shape", "bytes",
             "file");
  ByteCount bytes;
  std::size_t elements = 0;
  for (const std::string& name : weights.names()) {
    const TensorSpec& spec = weights.find(name)->spec;
    fmt::print("{:<{}}  {:<5}  {:<16}  {:>12}  {}\n", name, widest, name_of(spec.dtype),
               to_string(spec.shape), spec.bytes(), weights.file_of(name));
    elements += static_cast<std::size_t>(spec.shape.elements());
    bytes.add(spec);
  }
  fmt::print("\n{} tensors, {} elements, {}\n", weights.names().size(), elements, bytes.text());
}

std::string describe_model(const std::filesystem::path& directory) {
  const TransformerConfig model = read_model_config(directory);
  const std::string architecture = is_hugging_face(directory)
                                       ? read_hugging_face(directory).architecture
                                       : architecture_of(model);
  return fmt::format(
      "{}: {} layers, {} heads, width {}, vocabulary {}, {} parameters\n",
      architecture.empty() ? "a model that no architecture of transformers computes" : architecture,
      model.layers, model.heads, model.width, model.vocabulary, parameter_count(model));
}

// A line, or nothing where no state is saved. Ranges of one state count as one tensor.
std::string describe_optimizer(const std::filesystem::path& directory) {
  if (!has_weights(directory, "optimizer")) return "";
  const WeightsDirectory optimizer(directory, "optimizer");
  ByteCount bytes;
  std::set<std::string> wholes;
  for (const std::string& name : optimizer.names()) {
    bytes.add(optimizer.find(name)->spec);
    wholes.insert(name);
  }
  const SaveSelection selection = select_saves(directory);
  for (const Save& save : selection.candidates) {
    for (const SavedTensor& tensor : save.state.tensors) {
      if (tensor.range && wholes.erase(tensor.name) > 0) wholes.insert(tensor.range->whole);
    }
  }
  return fmt::format("state of the optimizer: {} tensors, {}\n", wholes.size(), bytes.text());
}

// What is broken; empty where nothing is.
std::string fault_of(const Save& save) {
  try {
    require_sound(save.directory, save.state);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// Whether the directory still holds this save: a job may have removed or replaced it.
bool still_there(const Save& save) {
  try {
    return read_save_state(save.directory).save == save.state.save;
  } catch (const Error&) {
    std::error_code error;
    return std::filesystem::exists(save.directory, error);
  }
}

// Of an export or of another program: a directory without state.json.
void verify_model(const std::string& directory) {
  (void)WeightsDirectory(directory, "model");
  if (has_weights(directory, "optimizer")) (void)WeightsDirectory(directory, "optimizer");
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::path(directory) / kSumsName, error)) {
    fmt::print("'{}': {} files are as {} says\n", directory, require_sums(directory), kSumsName);
    return;
  }
  fmt::print(
      "'{}' has no hashes to compare with: names, types, shapes and sizes are sound, values were "
      "not compared\n",
      directory);
}

}  // namespace

std::string sum_line(std::span<const std::byte> bytes, const std::string& name) {
  return fmt::format("{}  {}\n", sha256_hex(bytes), name);
}

std::string sums_of(const std::vector<std::filesystem::path>& files) {
  std::string sums;
  for (const std::filesystem::path& file : files) {
    sums += sum_line(MappedFile(file, ErrorCode::kIo).bytes(), file.filename().string());
  }
  return sums;
}

std::size_t require_sums(const std::filesystem::path& directory) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 24, kDigits = 64;
  const std::filesystem::path path = directory / kSumsName;
  std::istringstream lines(read_text(path, kMostBytes, ErrorCode::kWeights));
  std::size_t count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const std::string name = line.substr(std::min(line.size(), kDigits + 2));
    if (!is_save_file_name(name)) {
      throw_error(ErrorCode::kWeights, "'{}' is damaged: '{}' is no sum of a model's file",
                  path.string(), line);
    }
    const std::string found =
        sum_line(MappedFile(directory / name, ErrorCode::kWeights).bytes(), name);
    if (found == line + '\n') continue;
    throw_error(ErrorCode::kWeights, "'{}' is damaged: expected sha256 {}, found {}",
                (directory / name).string(), line.substr(0, kDigits), found.substr(0, kDigits));
  }
  return count;
}

int digest_command(const std::vector<std::string>& arguments) {
  std::string directory;
  Verify verify = Verify::kFull;
  OptionTable table("sluice digest DIR [options]", kAboutDigest);
  table.add_argument("DIR", directory);
  table.add_choice("verify", verify, {{"full", Verify::kFull}, {"off", Verify::kOff}},
                   "what is compared with the hashes of a save: all its files, or nothing");
  return run_guarded(table, arguments, [&] {
    const std::filesystem::path save = newest_save(directory);
    SavedTensors tensors = open_model_tensors(save, verify);
    const SaveSelection found = select_saves(save);
    if (!found.candidates.empty()) {
      const SaveState& state = found.candidates.front().state;
      for (const auto& [parts, names] : {std::pair(state.virtual_replicas(), kVirtualReplicas),
                                         {state.tensor_shards(), kTensorShards}}) {
        if (parts > 1) fmt::print(stderr, "computed with {} {}\n", parts, names.parts);
      }
      if (state.gradient_order() != GradientOrder::kStep) {
        fmt::print(stderr, "computed with --gradient-order {}\n", name_of(state.gradient_order()));
      }
      for (const std::string& arithmetic : state.arithmetic) {
        fmt::print(stderr, "computed with {}\n", arithmetic);
      }
    }
    tensors.prefer_masters();
    std::vector<ParameterDigest> digests;
    std::vector<float> values;
    for (const std::string& name : tensors.parameters()) {
      values.resize(static_cast<std::size_t>(tensors.find(name)->shape.elements()));
      tensors.read(name, values);
      digests.push_back({name, sha256_hex(std::as_bytes(std::span<const float>(values)))});
      fmt::print("{}  {}\n", digests.back().sha256, name);
    }
    fmt::print("{}  total\n", digest_all(digests));
  });
}

int inspect_command(const std::vector<std::string>& arguments) {
  std::string directory;
  OptionTable table("sluice inspect DIR", kAboutInspect);
  table.add_argument("DIR", directory);
  return run_guarded(table, arguments, [&] {
    const std::filesystem::path path = newest_save(directory);
    // All is read before anything is printed: a directory that is wrong gives its error alone.
    const WeightsDirectory weights(path, "model");
    const std::string rest = describe_model(path) + describe_optimizer(path);
    print_tensors(weights);
    fmt::print("{}", rest);
  });
}

int verify_command(const std::vector<std::string>& arguments) {
  std::string directory;
  OptionTable table("sluice verify DIR", kAboutVerify);
  table.add_argument("DIR", directory);
  return run_guarded(table, arguments, [&] {
    const SaveSelection selection = select_saves(directory);
    if (selection.candidates.empty() && selection.broken.empty()) {
      if (!has_weights(directory, "model")) (void)newest_save(directory);  // says what is there
      return verify_model(directory);
    }
    std::size_t broken = selection.broken.size(), gone = 0;
    double bytes = 0;
    const double start = steady_seconds();
    fmt::print("{:<20} {:<21} {:>10} {:>6}  {}\n", "save", "time", "MB", "files", "state");
    for (const Save& save : selection.candidates) {
      const std::string fault = fault_of(save);
      if (!fault.empty() && !still_there(save)) {
        ++gone;
        continue;
      }
      if (!fault.empty()) ++broken;
      double size = 0;
      for (const SavedFile& file : save.state.files) size += static_cast<double>(file.bytes);
      bytes += size;
      fmt::print("{:<20} {:<21} {:>10.1f} {:>6}  {}\n", step_directory_name(save.state.step),
                 save.state.time, size * 1e-6, save.state.files.size() + 1,
                 fault.empty() ? "ok" : fault);
    }
    for (const std::string& fault : selection.broken) fmt::print("broken: {}\n", fault);
    fmt::print("{:.1f} MB in {:.2f} s\n", bytes * 1e-6, steady_seconds() - start);
    if (gone > 0) fmt::print("{} removed meanwhile by a job that saves there\n", gone);
    if (broken == 0) return;
    throw Error(ErrorCode::kWeights,
                fmt::format("{} of {} saves in '{}' {} broken", broken,
                            selection.candidates.size() + selection.broken.size(), directory,
                            broken == 1 ? "is" : "are"));
  });
}

}  // namespace sluice
