#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>
#include <string>

#include <sluice/hugging_face.hpp>

#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/options/process.hpp"
#include "runtime/saves/save_commands.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace {

constexpr const char* kAboutInspect =
    "Prints what a model's directory holds: a line for every tensor of its files, then the model, "
    "its\n"
    "parameters and bytes. DIR is a directory of Hugging Face, what 'sluice train --save DIR' "
    "wrote,\n"
    "of which it takes the newest step, or one step. Reads no values and needs no MPI.";

std::string text_of(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.rank(); ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", shape[i]);
  return text + "]";
}

// Bytes of tensors, and their types.
class ByteCount {
 public:
  void add(const TensorSpec& spec) {
    bytes_ += spec.bytes();
    types_.insert(name_of(spec.dtype));
  }
  [[nodiscard]] std::string text() const {
    return fmt::format("{} bytes{}{}", bytes_, types_.size() > 1 ? ", " : " of ",
                       fmt::join(types_, ", "));
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
               text_of(spec.shape), spec.bytes(), weights.file_of(name));
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

// A line, or nothing where no state is saved.
std::string describe_optimizer(const std::filesystem::path& directory) {
  if (!has_weights(directory, "optimizer")) return "";
  const WeightsDirectory optimizer(directory, "optimizer");
  ByteCount bytes;
  for (const std::string& name : optimizer.names()) bytes.add(optimizer.find(name)->spec);
  return fmt::format("state of the optimizer: {} tensors, {}\n", optimizer.names().size(),
                     bytes.text());
}

}  // namespace

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

}  // namespace sluice
